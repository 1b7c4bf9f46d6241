"""The transformers side: the reference at tiny size, and what can be measured on it.

The modules of this package import torch and transformers, and run in a subprocess of their own (see :mod:`.ask`, which
imports neither). What they find goes back as plain JSON.
"""
