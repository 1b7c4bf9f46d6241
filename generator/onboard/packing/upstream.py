"""What Megatron-Bridge refuses, in the order in which it does.

Sources are below ``src/megatron/bridge`` of NVIDIA-NeMo/Megatron-Bridge, main of 2026-08-22. The order is that of the
code: the specs check themselves when they are made, the packed paths before the numbers, and only then does
``ConfigContainer.validate`` run.
"""

from __future__ import annotations

import glob
import math
import os
from typing import Final

from onboard.packing.rules import Change, Mend, Rule, change, round_up, to
from onboard.packing.settings import COLLATED, Settings

_SPECS: Final = "data/packing/config.py PackedSequenceSpecs"
_PATHS: Final = "data/packing/paths.py"
_VALIDATE: Final = "training/config.py ConfigContainer.validate"
_BUILDERS: Final = "data/builders/gpt_sft.py GPTSFTDatasetConfig.validate"
_GRAPHS: Final = "utils/cuda_graph.py validate_cuda_graph_configuration"
_PARQUET: Final = (".parquet", ".pq")


def packed_files(spec: str) -> list[str]:
    """The files that a packed data path stands for; empty where it stands for none.

    Args:
        spec: a .npy file, a .parquet or .pq file, a pattern for such files, or a directory that holds some.
    """
    if spec.lower().endswith(".npy"):
        return [spec] if os.path.exists(spec) else []
    if "*" in spec or "?" in spec:
        found = glob.glob(spec)
    elif os.path.isdir(spec):
        found = [os.path.join(spec, name) for name in os.listdir(spec)]
    else:
        found = [spec] if os.path.exists(spec) else []
    return sorted(path for path in found if path.lower().endswith(_PARQUET))


def _bad_paths(s: Settings) -> list[str]:
    return [path for path in (s.train_path, s.val_path) if path is not None and not packed_files(path)]


def _mend_paths(s: Settings) -> Mend:
    return Mend(
        advice=f"give a .parquet file, a pattern or a directory of such files that exists in place of "
        f"{', '.join(_bad_paths(s))}, or leave the path out: the builder then packs the data itself. "
        "A .npy file is read too, and deprecated"
    )


def _mend_sample_length(s: Settings) -> Mend:
    if s.pack_size > 0:
        return to(longest_sample=s.pack_size)
    return to(longest_sample=None)


def _mend_both(s: Settings) -> Mend:
    if s.kind == "gpt_sft":
        return to("offline packing is the one for text", in_batch=False)
    return to("in-batch packing is the one for this kind of dataset", offline=False, specs=None)


def _mend_no_specs(s: Settings) -> Mend:
    return to(specs={"packed_sequence_size": s.length, "pad_seq_to_mult": s.needed_pad_multiple})


def _mend_unused_specs(s: Settings) -> Mend:
    if s.in_batch or s.kind != "gpt_sft":
        return to("only offline packing reads the specs", specs=None)
    return to("or leave the specs out, to train unpacked", offline=True)


def _mend_length(multiple: int, s: Settings) -> Mend:
    length = round_up(s.length, multiple)
    changes = change(model_seq_length=length)
    if s.seq_length is not None:
        changes += change(seq_length=length)
    if s.offline and s.pack_size > 0:
        # The rows are as long as the sequence.
        changes += change(pack_size=length)
    return Mend(changes, f"the next multiple of {multiple}")


def length_multiple(s: Settings) -> int:
    """What the sequence length has to be a multiple of under every rule and trap at once."""
    return math.lcm(s.collate_multiple, s.needed_pad_multiple, s.tp if s.sequence_parallel else 1)


def _mend_cp_length(s: Settings) -> Mend:
    return _mend_length(length_multiple(s), s)


def _bad_eval_batch(s: Settings) -> bool:
    micro, whole = s.eval_micro_batch_size, s.eval_global_batch_size
    return micro is not None and whole is not None and (s.eval_dp == 0 or whole % (micro * s.eval_dp) != 0)


def _bad_layout(s: Settings) -> bool:
    return not s.divides_the_world or _bad_eval_batch(s)


def _mend_layout(s: Settings) -> Mend:
    if not s.divides_the_world:
        step = math.lcm(s.model_parallel_size, s.eval_model_parallel_size)
        return Mend(
            advice=f"run on a number of processes that is a multiple of {step} ({round_up(s.world_size, step)} is the "
            "next), or split the model into fewer parts"
        )
    assert s.eval_micro_batch_size is not None
    assert s.eval_global_batch_size is not None
    unit = s.eval_micro_batch_size * s.eval_dp
    if s.given_eval_global_batch_size is None and s.given_eval_micro_batch_size is None and s.eval_dp == s.dp:
        return to(f"the next multiple of {unit}", global_batch_size=round_up(s.eval_global_batch_size, unit))
    return to(f"the next multiple of {unit}", given_eval_global_batch_size=round_up(s.eval_global_batch_size, unit))


def _lacks_batch(s: Settings) -> bool:
    return s.micro_batch_size is None or s.global_batch_size is None


def _mend_lacking_batch(s: Settings) -> Mend:
    micro = s.micro_batch_size or (2 if s.in_batch else 1)
    whole = s.global_batch_size or round_up(1, micro * max(s.dp, 1))
    changes: tuple[Change, ...] = ()
    if s.micro_batch_size is None:
        changes += change(micro_batch_size=micro)
    if s.global_batch_size is None:
        changes += change(global_batch_size=whole)
    return Mend(changes, "the smallest that the layout takes; choose the batch that you mean")


def _mend_energon(s: Settings) -> Mend:
    return to("or leave it out", given_eval_micro_batch_size=s.micro_batch_size)


def _bad_cp_comm(s: Settings) -> bool:
    kinds = s.cp_comm_type if isinstance(s.cp_comm_type, (list, tuple)) else [s.cp_comm_type or "p2p"]
    if any("a2a+p2p" in str(kind) for kind in kinds) and s.hierarchical_cp is None:
        return True
    return s.hierarchical_cp is not None and math.prod(s.hierarchical_cp) != s.cp


def _mend_cp_comm(s: Settings) -> Mend:
    if s.hierarchical_cp is None:
        advice = f"sizes whose product is CP, {s.cp}: the first is that of the groups inside a node"
        return to(advice, hierarchical_cp=[s.cp, 1])
    return to(f"or give sizes whose product is {s.cp}", hierarchical_cp=[s.cp, 1])


def _mend_micro_batch(s: Settings) -> Mend:
    micro, whole = s.micro_batch_size or 1, s.global_batch_size
    if whole is None or s.pack_size <= 0:
        return to(micro_batch_size=1)
    return to(
        f"a step then holds as many tokens as before, {whole} * {s.pack_size}; the same with longer rows: "
        f"global_batch_size {max(whole // micro, 1)} and packed_sequence_size {s.pack_size * micro}",
        micro_batch_size=1,
    )


def _mend_in_batch(s: Settings) -> Mend:
    return to("at least two rows are needed to pack any", micro_batch_size=2)


def _mend_mismatch(s: Settings) -> Mend:
    assert s.seq_length is not None
    multiple = length_multiple(s)
    if s.seq_length % multiple == 0 or s.model_seq_length % multiple:
        return to(model_seq_length=s.seq_length)
    return to(seq_length=s.model_seq_length)


UPSTREAM: Final = (
    Rule(
        "P03",
        "error",
        "a packed data path that does not exist, or is neither .npy nor .parquet",
        "the file cannot be used (FileNotFoundError, or ValueError for another format)",
        f"{_SPECS}._validate_packed_path, {_PATHS}",
        ("train_path", "val_path"),
        lambda s: bool(_bad_paths(s)),
        _mend_paths,
    ),
    Rule(
        "P01",
        "error",
        "`pad_seq_to_mult` is given and not above 0",
        "a length cannot be rounded up to it: not a positive integer",
        f"{_SPECS}.__post_init__",
        ("pad_multiple",),
        lambda s: s.pad_multiple is not None and s.pad_multiple <= 0,
        lambda s: to(pad_multiple=s.needed_pad_multiple),
    ),
    Rule(
        "P02",
        "error",
        "`max_single_sequence_length` is given and not above 0, or above a `packed_sequence_size` that is above 0",
        "no sample could be that long",
        f"{_SPECS}.__post_init__",
        ("longest_sample", "pack_size"),
        lambda s: s.longest_sample is not None and (s.longest_sample <= 0 or 0 < s.pack_size < s.longest_sample),
        _mend_sample_length,
    ),
    Rule(
        "P04",
        "error",
        "offline and in-batch packing are both on",
        "they exclude each other: rows that are packed already would be packed again",
        _VALIDATE,
        ("offline", "in_batch"),
        lambda s: s.offline and s.in_batch,
        _mend_both,
    ),
    Rule(
        "P05",
        "error",
        "offline packing is on without `offline_packing_specs`",
        "nothing says how long a packed row is",
        f"{_VALIDATE}, {_BUILDERS}",
        ("offline", "specs"),
        lambda s: s.offline and s.specs is None,
        _mend_no_specs,
    ),
    Rule(
        "P06",
        "error",
        "`offline_packing_specs` are given and offline packing is off",
        "the specs would be ignored",
        f"{_VALIDATE}, {_BUILDERS}",
        ("offline", "specs"),
        lambda s: s.specs is not None and not s.offline,
        _mend_unused_specs,
    ),
    Rule(
        "P07",
        "error",
        "`pad_cu_seqlens` without `pad_to_max_length: true` (of the dataset or its `dataset_kwargs`; 1 does not count)",
        "padded boundaries end at a fixed length, and rows have none",
        _VALIDATE,
        ("pad_cu_seqlens", "dataset_pads_to_max", "kwargs_pad_to_max"),
        lambda s: s.specs is not None and s.pad_cu_seqlens and not s.fixed_length,
        lambda s: to(kwargs_pad_to_max=True),
    ),
    Rule(
        "P08",
        "error",
        "offline packing with full-iteration or transformer-engine CUDA graphs, without `pad_to_max_length: true`",
        "a CUDA graph needs rows of one length",
        _VALIDATE,
        ("cuda_graph_impl", "dataset_pads_to_max", "kwargs_pad_to_max"),
        lambda s: s.specs is not None and s.training_graph and not s.fixed_length,
        lambda s: to(kwargs_pad_to_max=True),
    ),
    Rule(
        "P09",
        "error",
        "offline packing with CUDA graphs that hold attention (full-iteration; transformer-engine with no list of "
        'modules, or with "attn" in it), without `pad_cu_seqlens`',
        "attention in a CUDA graph needs boundaries of a fixed number",
        _VALIDATE,
        ("cuda_graph_impl", "graph_modules", "pad_cu_seqlens"),
        lambda s: s.specs is not None and s.attention_graph and not s.pad_cu_seqlens,
        lambda s: to("the packed data then needs its metadata file", pad_cu_seqlens=True),
    ),
    Rule(
        "P10",
        "error",
        "a dataset that is padded at collate time (hf_sft, energon, mock_vlm) whose `seq_length` is no multiple of M",
        "padding to M, which CP and sequence parallel need, would exceed the sequence length",
        _VALIDATE,
        ("kind", "seq_length", "cp", "eval_cp", "tp", "given_sequence_parallel", "collate_multiple"),
        lambda s: s.kind in COLLATED and s.seq_length is not None and s.seq_length % s.collate_multiple != 0,
        lambda s: _mend_length(length_multiple(s), s),
    ),
    Rule(
        "P11",
        "error",
        "offline packing with a `packed_sequence_size` that is not above 0",
        "rows have no length to be filled to",
        f"{_BUILDERS}, {_VALIDATE}",
        ("pack_size",),
        lambda s: s.offline and s.specs is not None and s.pack_size <= 0,
        lambda s: to(pack_size=s.length),
    ),
    Rule(
        "P12",
        "error",
        '`cuda_graph_impl: "local"` that is not full-iteration',
        "Megatron-Bridge supports local CUDA graphs for the whole iteration only",
        _GRAPHS,
        ("cuda_graph_impl", "graph_modules"),
        lambda s: s.cuda_graph_impl == "local" and not s.full_iteration_graph,
        lambda s: to('which takes modules such as "attn" and "mlp"', cuda_graph_impl="transformer_engine"),
    ),
    Rule(
        "P20",
        "error",
        "an energon dataset with `eval_micro_batch_size` other than `micro_batch_size`, unless `do_validation` is off",
        "one loader makes the batches of both",
        _VALIDATE,
        ("kind", "micro_batch_size", "eval_micro_batch_size"),
        lambda s: (
            s.kind == "energon"
            and s.do_validation
            and s.divides_the_world
            and s.micro_batch_size is not None
            and s.eval_micro_batch_size != s.micro_batch_size
        ),
        _mend_energon,
    ),
    Rule(
        "P13",
        "error",
        "a world size that is no multiple of TP*PP*CP (in training, or with the CP of evaluation), or an eval global "
        "batch that is no multiple of eval micro batch * eval data parallel size (the training sizes where none are "
        "given)",
        "the layout does not come out even",
        f"{_VALIDATE}, get_data_parallel_size",
        (
            "world_size",
            "model_parallel_size",
            "eval_model_parallel_size",
            "eval_micro_batch_size",
            "eval_global_batch_size",
            "eval_dp",
        ),
        _bad_layout,
        _mend_layout,
    ),
    Rule(
        "P21",
        "error",
        "`micro_batch_size` or `global_batch_size` is not given",
        "they have no default",
        _VALIDATE,
        ("micro_batch_size", "global_batch_size"),
        _lacks_batch,
        _mend_lacking_batch,
    ),
    Rule(
        "P14",
        "error",
        "CP > 1 and `model.seq_length` is no multiple of 2*CP (for every kind of dataset)",
        "CP gives each rank two slices of the sequence, which have to be equal",
        _VALIDATE,
        ("model_seq_length", "cp"),
        lambda s: s.cp > 1 and s.model_seq_length % (2 * s.cp) != 0,
        _mend_cp_length,
    ),
    Rule(
        "P15",
        "error",
        "CP > 1 and fine-tuning, without `calculate_per_token_loss` (pre-training is exempt)",
        "the loss would be averaged wrongly: a rank may hold tokens that are all masked",
        _VALIDATE,
        ("cp", "kind", "per_token_loss"),
        lambda s: s.cp > 1 and s.fine_tunes and not s.per_token_loss,
        lambda s: to(per_token_loss=True),
    ),
    Rule(
        "P16",
        "error",
        "CP > 1 and fine-tuning, with `average_in_collective` (pre-training is exempt, and Megatron-FSDP resets the "
        "flag first)",
        "the loss would be averaged wrongly: gradients would be divided twice",
        f"{_VALIDATE}, _validate_and_apply_megatron_fsdp_v1_configs",
        ("cp", "kind", "averages_in_collective", "megatron_fsdp"),
        lambda s: s.cp > 1 and s.fine_tunes and s.averages,
        lambda s: to(averages_in_collective=False),
    ),
    Rule(
        "P22",
        "error",
        '`cp_comm_type` "a2a+p2p" without `hierarchical_context_parallel_sizes`, or sizes whose product is not CP',
        "CP would be off without a word, and each rank attend to its own part",
        "training/config.py ConfigContainer._validate_cp_comm_type",
        ("cp_comm_type", "hierarchical_cp", "cp"),
        _bad_cp_comm,
        _mend_cp_comm,
    ),
    Rule(
        "P17",
        "error",
        "offline packing with `micro_batch_size` above 1",
        "a packed row is a batch of its own",
        _VALIDATE,
        ("offline", "micro_batch_size", "global_batch_size", "pack_size"),
        lambda s: s.offline and s.micro_batch_size is not None and s.micro_batch_size > 1,
        _mend_micro_batch,
    ),
    Rule(
        "P18",
        "error",
        "in-batch packing with `micro_batch_size` 1",
        "there is nothing to pack",
        _VALIDATE,
        ("in_batch", "micro_batch_size"),
        lambda s: s.in_batch and s.micro_batch_size == 1,
        _mend_in_batch,
    ),
    Rule(
        "P19",
        "error",
        "`model.seq_length` differs from `dataset.seq_length`, where the dataset has one",
        "the model and its data have to agree on the length",
        _VALIDATE,
        ("model_seq_length", "seq_length"),
        lambda s: s.seq_length is not None and s.model_seq_length != s.seq_length,
        _mend_mismatch,
    ),
)
"""In the order in which they fire; the numbers are names, and stay what they were."""
