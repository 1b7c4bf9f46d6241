"""What Megatron-Bridge lets through and what then goes wrong. Each was run: its validation says OK."""

from __future__ import annotations

import math
from typing import Final

from onboard.packing.families import Packing
from onboard.packing.rules import Change, Mend, Rule, change, round_up, to
from onboard.packing.settings import Settings
from onboard.packing.upstream import length_multiple

_PADDING: Final = "data/packing/offline.py tokenize_dataset"
_SLICING: Final = "training/utils/packed_seq_utils.py"
_TURN_OFF: Final[dict[Packing, tuple[Change, ...]]] = {
    "offline": change(offline=False, specs=None),
    "in-batch": change(in_batch=False),
}


def _packed_offline(s: Settings) -> bool:
    return s.offline and s.specs is not None


def _mend_multiple(s: Settings) -> Mend:
    """The needed multiple, and the user's as well where the rows can hold both."""
    kept = math.lcm(s.pad_multiple or 1, s.needed_pad_multiple)
    new = kept if s.pad_multiple and s.pad_multiple > 0 and s.pack_size % kept == 0 else s.needed_pad_multiple
    return to("pack the data again: its samples are padded before they are packed", pad_multiple=new)


def _bad_pack_size(s: Settings) -> bool:
    if not _packed_offline(s) or s.pack_size <= 0:
        return False
    return s.pack_size != s.length or bool(s.pad_multiple and s.pad_multiple > 0 and s.pack_size % s.pad_multiple)


def _mend_pack_size(s: Settings) -> Mend:
    needed = length_multiple(s)
    multiple = s.pad_multiple if s.pad_multiple and s.pad_multiple > 0 else 1
    if s.length % multiple == 0:
        return to(pack_size=s.length)
    if s.length % needed == 0:
        # The user's own multiple does not divide the rows; the needed one does.
        return to(pad_multiple=s.needed_pad_multiple, pack_size=s.length)
    length = round_up(s.length, math.lcm(multiple, needed))
    changes = change(pack_size=length, model_seq_length=length)
    return Mend(changes + (change(seq_length=length) if s.seq_length is not None else ()))


def _mend_length(s: Settings) -> Mend:
    length = round_up(s.length, length_multiple(s))
    changes = change(model_seq_length=length)
    if s.seq_length is not None:
        changes += change(seq_length=length)
    if s.offline and s.pack_size > 0:
        changes += change(pack_size=length)
    return Mend(changes, f"the next multiple of {length_multiple(s)}")


def _bad_training_batch(s: Settings) -> bool:
    """Whether the training batch does not come out even, where P13 does not say so already."""
    if s.micro_batch_size is None or s.global_batch_size is None or not s.divides_the_world or s.dp == 0:
        return False
    as_training = (
        s.eval_micro_batch_size == s.micro_batch_size
        and s.eval_global_batch_size == s.global_batch_size
        and s.eval_dp == s.dp
    )
    return not as_training and s.global_batch_size % (s.micro_batch_size * s.dp) != 0


def _mend_training_batch(s: Settings) -> Mend:
    unit = (s.micro_batch_size or 1) * s.dp
    return to(f"the next multiple of {unit}", global_batch_size=round_up(s.global_batch_size or 1, unit))


def _bad_eval_micro_batch(s: Settings) -> bool:
    given = s.given_eval_micro_batch_size
    return given is not None and ((s.offline and given > 1) or (s.in_batch and given == 1))


def _mend_eval_micro_batch(s: Settings) -> Mend:
    micro = 1 if s.offline else max(s.micro_batch_size or 2, 2)
    whole = s.eval_global_batch_size or 1
    unit = micro * max(s.eval_dp, 1)
    changes = change(given_eval_micro_batch_size=micro)
    if whole % unit:
        changes += change(given_eval_global_batch_size=round_up(whole, unit))
    return Mend(changes)


def _packings(s: Settings) -> tuple[Packing, ...]:
    on: tuple[tuple[Packing, bool], ...] = (("offline", s.offline), ("in-batch", s.in_batch))
    return tuple(packing for packing, is_on in on if is_on)


def _opts_out(s: Settings) -> bool:
    return s.known is not None and any(s.known.opt_outs(packing, s) for packing in _packings(s))


def _mend_opt_out(s: Settings) -> Mend:
    assert s.known is not None
    found = [(packing, *item) for packing in _packings(s) for item in s.known.opt_outs(packing, s)]
    changes = tuple(dict.fromkeys(change for packing, _, _ in found for change in _TURN_OFF[packing]))
    reasons = [
        f"{family.name}, {packing} packing{opt_out.in_brackets}: {opt_out.who}; {opt_out.then}"
        for packing, family, opt_out in found
    ]
    return Mend(changes, "; ".join(reasons))


TRAPS: Final = (
    Rule(
        "T01",
        "warning",
        "offline packing, CP > 1, `pad_seq_to_mult` is no multiple of 2*CP",
        "each rank gets wrong slices of the samples, or training crashes",
        f"{_PADDING}, {_SLICING}",
        ("cp", "pad_multiple", "needed_pad_multiple"),
        lambda s: _packed_offline(s) and s.cp > 1 and s.pad_multiple is not None and s.pad_multiple % (2 * s.cp) != 0,
        _mend_multiple,
    ),
    Rule(
        "T02",
        "warning",
        "offline packing, sequence parallel, `pad_seq_to_mult` is no multiple of CP*TP",
        "each rank gets wrong slices of the samples, or training crashes",
        f"{_PADDING}, {_SLICING}",
        ("cp", "tp", "given_sequence_parallel", "pad_multiple", "needed_pad_multiple"),
        lambda s: (
            _packed_offline(s)
            and s.sequence_parallel
            and s.pad_multiple is not None
            and s.pad_multiple % (s.cp * s.tp) != 0
        ),
        _mend_multiple,
    ),
    Rule(
        "T03",
        "warning",
        "offline packing, `packed_sequence_size` differs from the sequence length, or is no multiple of "
        "`pad_seq_to_mult`",
        "rows do not fit the model's length, or samples do not fit the rows",
        "data/builders/gpt_sft.py, data/packing/offline.py",
        ("pack_size", "seq_length", "model_seq_length", "pad_multiple"),
        _bad_pack_size,
        _mend_pack_size,
    ),
    Rule(
        "T04",
        "warning",
        "packing with multi-token prediction",
        "documented as unsupported: predictions reach over the end of a sequence",
        "docs/training/multi-token-prediction.md",
        ("offline", "in_batch", "mtp_layers"),
        lambda s: s.packs and s.mtp_layers > 0,
        lambda s: to("the checkpoint's MTP layers are then not trained", given_mtp=None),
    ),
    Rule(
        "T05",
        "warning",
        "text fine-tuning (gpt_sft), sequence parallel, the sequence length is no multiple of TP",
        "training crashes where the sequence is cut (the same hf_sft configuration is refused)",
        "training/gpt_step.py",
        ("kind", "tp", "given_sequence_parallel", "seq_length", "model_seq_length"),
        lambda s: s.kind == "gpt_sft" and s.sequence_parallel and s.length % s.tp != 0,
        _mend_length,
    ),
    Rule(
        "T06",
        "warning",
        "`calculate_per_token_loss` with `average_in_collective`, where P16 does not say so",
        "an assertion fails when the model is wrapped for data parallel training",
        "megatron/core/distributed/distributed_data_parallel.py",
        ("per_token_loss", "averages_in_collective", "cp"),
        lambda s: s.per_token_loss and s.averages and not (s.cp > 1 and s.fine_tunes),
        lambda s: to(averages_in_collective=False),
    ),
    Rule(
        "T07",
        "warning",
        "the global batch is below the data parallel size or no multiple of micro batch * data parallel size, and "
        "evaluation has sizes of its own, so that P13 does not see it",
        "training crashes when the number of micro batches is computed",
        "megatron/core/num_microbatches_calculator.py",
        ("global_batch_size", "micro_batch_size", "dp"),
        _bad_training_batch,
        _mend_training_batch,
    ),
    Rule(
        "T08",
        "warning",
        "an eval micro batch above 1 with offline packing, or of 1 with in-batch packing",
        "the first evaluation crashes, hours into the training",
        "training/eval.py",
        ("offline", "in_batch", "given_eval_micro_batch_size"),
        _bad_eval_micro_batch,
        _mend_eval_micro_batch,
    ),
    Rule(
        "T09",
        "warning",
        "offline packing with `pad_seq_to_mult: null`",
        "a comparison with null fails when the first batch is collated (TypeError)",
        "data/packing/gpt_sft.py GPTSFTPackedDataset.collate_fn",
        ("pad_multiple",),
        lambda s: _packed_offline(s) and s.pad_multiple is None,
        lambda s: to(pad_multiple=s.needed_pad_multiple),
    ),
    Rule(
        "T10",
        "warning",
        "packing in a model family that opts out of it",
        "refused at run time, or the sequences silently stay unpacked",
        "recipes/, data/collators/",
        ("hf_model", "offline", "in_batch", "peft"),
        _opts_out,
        _mend_opt_out,
    ),
)
"""In the order of their numbers."""
