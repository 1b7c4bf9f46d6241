"""Packed data on disk: read as a stream, each kind of damage found with its rows.

- :mod:`.damage`: the kinds of damage, as data
- :mod:`.reading`: parquet and .npy to batches of flat arrays
- :mod:`.rows`: what is looked at in a batch
- :mod:`.metadata`: the metadata beside the data
- :mod:`.inspecting`: all of it together
"""
