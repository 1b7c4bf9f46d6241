from __future__ import annotations

import importlib.util


def _has_megatron_bridge() -> bool:
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ImportError:
        return False


# Compares with Megatron-Bridge itself, where `pip install --no-deps megatron-bridge==0.3.1` was run.
collect_ignore = [] if _has_megatron_bridge() else ["test_megatron_bridge.py"]
