"""Hypotheses on attention: projections, norms of queries and keys, positions, scores, masks."""
