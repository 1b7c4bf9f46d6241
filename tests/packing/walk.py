"""Megatron-Bridge's validation as one walk from top to bottom over a plain mapping, to compare the rules with.

It shares nothing with the package: its own defaults, its own arithmetic, one `return` for each refusal in the order in
which Megatron-Bridge comes to it.
"""

from __future__ import annotations

from math import lcm, prod
from pathlib import Path
from typing import Any


def first_error(config: dict[str, Any]) -> str | None:
    """The first rule that refuses a configuration, or None."""
    model, dataset, train, ddp = (config.get(name) or {} for name in ("model", "dataset", "train", "ddp"))
    specs = dataset.get("offline_packing_specs")
    kind = dataset["kind"]

    # Making the specs.
    if specs is not None:
        for key in ("packed_train_data_path", "packed_val_data_path"):
            if specs.get(key) is not None and not Path(specs[key]).exists():
                return "P03"
        multiple, size, cap = (
            specs.get("pad_seq_to_mult", 1),
            specs.get("packed_sequence_size", -1),
            specs.get("max_single_sequence_length"),
        )
        if multiple is not None and multiple < 1:
            return "P01"
        if cap is not None and (cap < 1 or (size > 0 and cap > size)):
            return "P02"

    # The two kinds of packing.
    offline, in_batch = dataset.get("enable_offline_packing", False), dataset.get("enable_in_batch_packing", False)
    if offline and in_batch:
        return "P04"
    if offline and specs is None:
        return "P05"
    if specs is not None and not offline:
        return "P06"

    # CUDA graphs over packed rows.
    graph, modules = model.get("cuda_graph_impl", "none"), model.get("cuda_graph_modules") or []
    modules = modules.split(",") if isinstance(modules, str) else modules
    whole = graph == "full_iteration" or (graph == "local" and "full_iteration" in modules)
    if specs is not None:
        kwargs = dataset.get("dataset_kwargs") or {}
        fixed = kwargs.get("pad_to_max_length") is True or dataset.get("pad_to_max_length") is True
        if specs.get("pad_cu_seqlens") and not fixed:
            return "P07"
        if (whole or graph == "transformer_engine") and not fixed:
            return "P08"
        layers = [name for name in modules if name != "full_iteration"]
        attention = whole or (graph == "transformer_engine" and (layers == [] or "attn" in layers))
        if attention and not specs.get("pad_cu_seqlens"):
            return "P09"

    # Lengths at collate time.
    tp, pp, cp = (model.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context"))
    eval_cp = model.get("eval_context_parallel_size")
    parallel = model.get("sequence_parallel", False) and tp > 1
    steps = [1]
    for size in {cp} if eval_cp is None else {cp, eval_cp}:
        steps += [2 * size] if size > 1 else []
        steps += [size * tp] if parallel else []
    length = dataset.get("seq_length")
    if kind in ("hf_sft", "energon", "mock_vlm") and length is not None and length % lcm(*steps):
        return "P10"
    if offline and specs.get("packed_sequence_size", -1) < 1:
        return "P11"
    if graph == "local" and not whole:
        return "P12"

    # The layout.
    world = config.get("world_size", 1)
    if world % (tp * pp * cp):
        return "P13"
    if eval_cp is not None and world % (tp * pp * eval_cp):
        return "P13"
    micro, batch = train.get("micro_batch_size"), train.get("global_batch_size")
    eval_micro, eval_batch = train.get("eval_micro_batch_size"), train.get("eval_global_batch_size")
    eval_micro, eval_batch = eval_micro or micro, eval_batch or batch
    if kind == "energon" and micro is not None and micro != eval_micro:
        return "P20"
    if eval_micro is not None and eval_batch is not None:
        replicas = world // (tp * pp * (cp if eval_cp is None else eval_cp))
        if eval_batch % (eval_micro * replicas):
            return "P13"
    if micro is None or batch is None:
        return "P21"

    # Context parallel.
    model_length = model.get("seq_length", 1024)
    if cp > 1:
        if model_length % (2 * cp):
            return "P14"
        if kind != "gpt_pretrain":
            if not model.get("calculate_per_token_loss", False):
                return "P15"
            if ddp.get("average_in_collective", False) and not ddp.get("use_megatron_fsdp", False):
                return "P16"
    kinds, sizes = model.get("cp_comm_type") or "p2p", model.get("hierarchical_context_parallel_sizes")
    if sizes is None and any("a2a+p2p" in name for name in (kinds if isinstance(kinds, list) else [kinds])):
        return "P22"
    if sizes is not None and prod(sizes) != cp:
        return "P22"

    # Rows of a micro batch, and the length that model and data share.
    if offline and micro > 1:
        return "P17"
    if in_batch and micro == 1:
        return "P18"
    if length is not None and model_length != length:
        return "P19"
    return None
