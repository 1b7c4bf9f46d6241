"""What a model is: its kind, and its architecture as a typed description with provenance."""
