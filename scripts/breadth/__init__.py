"""The sweep over many architectures: which ones, running them side by side, what is kept, and the tables."""
