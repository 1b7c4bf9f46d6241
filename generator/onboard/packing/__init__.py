"""Sequence packing in Megatron-Bridge: its rules, a planner that keeps them, and a reader of packed data.

- :mod:`.settings`: a configuration's values, missing ones filled in with Megatron-Bridge's defaults
- :mod:`.upstream` and :mod:`.traps`: the rules as data, each with its predicate and the change that mends it
- :mod:`.families`: which model families opt out of packing, as data
- :mod:`.checking`, :mod:`.planning`, :mod:`.fixing`: what ``onboard packing check``, ``plan`` and ``plan --fix`` do
- :mod:`.data`: what ``onboard packing inspect`` does

Nothing here imports torch or transformers, and only :mod:`.data` needs numpy and pyarrow.
"""
