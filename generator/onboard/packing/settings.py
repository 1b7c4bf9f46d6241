"""The values of a Megatron-Bridge configuration that packing depends on.

A configuration is a mapping of sections, as YAML or JSON holds it; it may hold any number of other keys. What it leaves
out has the default that Megatron-Bridge gives it.
"""

# A field's place, default and reader are said in one call, which makes nothing that could be shared.
# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from onboard.errors import UsageError
from onboard.packing.families import Known

KINDS: Final = ("gpt_sft", "hf_sft", "energon", "mock_vlm", "gpt_pretrain")
"""The kinds of dataset."""
COLLATED: Final = frozenset(("hf_sft", "energon", "mock_vlm"))
"""Kinds that pad and pack when a batch is collated."""
FINE_TUNING: Final = COLLATED | {"gpt_sft"}
"""Kinds whose samples mask a part of their tokens, so that a rank may hold no token with a loss."""

# Megatron-Bridge names the kind by the class of its dataset section.
_KIND_OF_CLASS: Final = {
    "GPTSFTDatasetConfig": "gpt_sft",
    "FinetuningDatasetConfig": "gpt_sft",
    "DirectHFSFTDatasetConfig": "hf_sft",
    "EnergonDatasetConfig": "energon",
    "MockVLMSFTDatasetConfig": "mock_vlm",
    "GPTDatasetConfig": "gpt_pretrain",
    "MockGPTDatasetConfig": "gpt_pretrain",
}
_NOT_MODULES: Final = ("full_iteration", "full_iteration_inference", "full")


class _Missing:
    """The absence of a key, where it differs from ``null``."""

    def __repr__(self) -> str:
        return "not given"


MISSING: Final = _Missing()


def lookup(mapping: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or :data:`MISSING`."""
    value: Any = mapping
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def _refuse(path: str, value: object, wanted: str) -> UsageError:
    return UsageError(
        f"cannot read {path} of the configuration",
        f"it is {value!r}, and {wanted} is needed",
        f"correct {path} in the file",
        code="packing.bad_value",
    )


def _whole(path: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(path, value, "a whole number")
    return value


def _count(path: str, value: Any) -> int:
    if _whole(path, value) < 1:
        raise _refuse(path, value, "a whole number above 0")
    return int(value)


def _flag(path: str, value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, (bool, int)):
        raise _refuse(path, value, "true or false")
    return bool(value)


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(path, value, "text")
    return value


def _kind(path: str, value: Any) -> str:
    if value not in KINDS:
        raise _refuse(path, value, f"one of {', '.join(KINDS)}")
    return str(value)


def _raw(path: str, value: Any) -> Any:
    return value


def _sizes(path: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise _refuse(path, value, "a list of whole numbers")
    return tuple(_count(path, item) for item in value)


def _at(
    path: str, default: Any, read: Callable[[str, Any], Any], *, null: bool = False, also: tuple[str, ...] = ()
) -> Any:
    """A field: where its value stands, its default, how it is read, and whether ``null`` is a value of its own."""
    return dataclasses.field(
        default=default, metadata={"path": path, "read": read, "null": null or default is None, "also": also}
    )


@dataclass(frozen=True)
class Settings:
    """A configuration's values. Sizes are in tokens, batches in rows, parallel sizes in processes."""

    world_size: int = _at("world_size", 1, _count)
    micro_batch_size: int | None = _at("train.micro_batch_size", None, _count)
    global_batch_size: int | None = _at("train.global_batch_size", None, _count)
    given_eval_micro_batch_size: int | None = _at(
        "train.eval_micro_batch_size", None, _count, also=("validation.eval_micro_batch_size",)
    )
    given_eval_global_batch_size: int | None = _at(
        "train.eval_global_batch_size", None, _count, also=("validation.eval_global_batch_size",)
    )
    model_seq_length: int = _at("model.seq_length", 1024, _count)
    tp: int = _at("model.tensor_model_parallel_size", 1, _count)
    pp: int = _at("model.pipeline_model_parallel_size", 1, _count)
    cp: int = _at("model.context_parallel_size", 1, _count)
    ep: int = _at("model.expert_model_parallel_size", 1, _count)
    eval_cp: int | None = _at(
        "model.eval_context_parallel_size", None, _count, also=("dist.eval_context_parallel_size",)
    )
    given_sequence_parallel: bool = _at("model.sequence_parallel", False, _flag)
    per_token_loss: bool = _at("model.calculate_per_token_loss", False, _flag)
    given_mtp: Any = _at("model.mtp_num_layers", MISSING, _raw, null=True)
    cuda_graph_impl: str = _at("model.cuda_graph_impl", "none", _text)
    given_graph_modules: Any = _at("model.cuda_graph_modules", None, _raw, also=("model.cuda_graph_scope",))
    cp_comm_type: Any = _at("model.cp_comm_type", None, _raw)
    hierarchical_cp: tuple[int, ...] | None = _at("model.hierarchical_context_parallel_sizes", None, _sizes)
    kind: str = _at("dataset.kind", "gpt_sft", _kind)
    seq_length: int | None = _at("dataset.seq_length", None, _count)
    offline: bool = _at("dataset.enable_offline_packing", False, _flag)
    in_batch: bool = _at("dataset.enable_in_batch_packing", False, _flag)
    specs: Any = _at("dataset.offline_packing_specs", None, _raw)
    pack_size: int = _at("dataset.offline_packing_specs.packed_sequence_size", -1, _whole)
    pad_multiple: int | None = _at("dataset.offline_packing_specs.pad_seq_to_mult", 1, _whole, null=True)
    pad_cu_seqlens: bool = _at("dataset.offline_packing_specs.pad_cu_seqlens", False, _flag)
    longest_sample: int | None = _at("dataset.offline_packing_specs.max_single_sequence_length", None, _whole)
    train_path: str | None = _at("dataset.offline_packing_specs.packed_train_data_path", None, _text)
    val_path: str | None = _at("dataset.offline_packing_specs.packed_val_data_path", None, _text)
    dataset_pads_to_max: Any = _at("dataset.pad_to_max_length", False, _raw)
    kwargs_pad_to_max: Any = _at("dataset.dataset_kwargs.pad_to_max_length", False, _raw)
    do_validation: bool = _at("dataset.do_validation", True, _flag)
    averages_in_collective: bool = _at("ddp.average_in_collective", False, _flag)
    megatron_fsdp: bool = _at("ddp.use_megatron_fsdp", False, _flag, also=("dist.use_megatron_fsdp",))
    megatron_fsdp_version: int = _at("ddp.megatron_fsdp_version", 1, _count)
    no_symmetric_registration: bool = _at("ddp.disable_symmetric_registration", False, _flag)
    peft: Any = _at("peft", None, _raw)
    hf_model: str | None = _at("hf_model", None, _text)
    known: Known | None = None
    """What ``hf_model`` says; not a key of the configuration."""

    @classmethod
    def read(cls, mapping: Mapping[str, Any], known: Known | None = None) -> Settings:
        """Read a configuration.

        Raises:
            UsageError: a value is not of the kind that its key needs, or the kind of the dataset is not given.
        """
        _require_sections(mapping)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            path = field.metadata.get("path")
            if path is None:
                continue
            # A flag may stand in two places, and holds where either says so.
            given = [value for p in (path, *field.metadata["also"]) if (value := lookup(mapping, p)) is not MISSING]
            value = next((value for value in given if value), given[0] if given else MISSING)
            if value is MISSING or (value is None and not field.metadata["null"]):
                continue
            values[field.name] = None if value is None else field.metadata["read"](path, value)
        if "kind" not in values:
            values["kind"] = _kind_of(mapping)
        return cls(**values, known=known)

    @property
    def sequence_parallel(self) -> bool:
        """Whether it is on: with TP 1 Megatron-Core takes it back."""
        return self.given_sequence_parallel and self.tp > 1

    @property
    def packs(self) -> bool:
        """Whether sequences are packed, either way."""
        return self.offline or self.in_batch

    @property
    def fine_tunes(self) -> bool:
        """Whether the dataset is one for fine-tuning."""
        return self.kind in FINE_TUNING

    @property
    def model_parallel_size(self) -> int:
        """TP * PP * CP, the processes that hold one model."""
        return self.tp * self.pp * self.cp

    @property
    def eval_model_parallel_size(self) -> int:
        """The same while evaluating."""
        return self.tp * self.pp * (self.eval_cp or self.cp)

    @property
    def divides_the_world(self) -> bool:
        """Whether whole models fill the world, in training and in evaluation."""
        return not (self.world_size % self.model_parallel_size or self.world_size % self.eval_model_parallel_size)

    @property
    def dp(self) -> int:
        """Data-parallel size: world / (TP * PP * CP), rounded down."""
        return self.world_size // self.model_parallel_size

    @property
    def eval_dp(self) -> int:
        """The same while evaluating."""
        return self.world_size // self.eval_model_parallel_size

    @property
    def eval_micro_batch_size(self) -> int | None:
        """The one given, or the training one."""
        return self.given_eval_micro_batch_size or self.micro_batch_size

    @property
    def eval_global_batch_size(self) -> int | None:
        """The one given, or the training one."""
        return self.given_eval_global_batch_size or self.global_batch_size

    @property
    def collate_multiple(self) -> int:
        """M, what a row's length is rounded up to at collate time, for training and for evaluation."""
        sizes = {self.cp, self.eval_cp or self.cp}
        return math.lcm(*(needed_multiple(size, self.tp, self.sequence_parallel) for size in sizes))

    @property
    def needed_pad_multiple(self) -> int:
        """What ``pad_seq_to_mult`` has to be a multiple of: lcm(2 * CP, CP * TP)."""
        return needed_multiple(self.cp, self.tp, self.sequence_parallel)

    @cached_property
    def graph_modules(self) -> tuple[str, ...]:
        """The modules that CUDA graphs are limited to; empty for whole layers."""
        return tuple(name for name in self._module_names if name not in _NOT_MODULES)

    @cached_property
    def _module_names(self) -> tuple[str, ...]:
        value = self.given_graph_modules
        if isinstance(value, str):
            value = value.split(",") if value else []
        items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        return tuple(dict.fromkeys(str(item).strip().rsplit(".", 1)[-1] for item in items))

    @property
    def full_iteration_graph(self) -> bool:
        """Whether one CUDA graph holds the whole iteration."""
        return self.cuda_graph_impl == "full_iteration" or (
            self.cuda_graph_impl == "local" and "full_iteration" in self._module_names
        )

    @property
    def training_graph(self) -> bool:
        """Whether training runs in CUDA graphs."""
        return self.full_iteration_graph or self.cuda_graph_impl == "transformer_engine"

    @property
    def attention_graph(self) -> bool:
        """Whether a CUDA graph holds attention, and with it the boundaries of the packed sequences."""
        return self.full_iteration_graph or (
            self.cuda_graph_impl == "transformer_engine" and (not self.graph_modules or "attn" in self.graph_modules)
        )

    @property
    def fixed_length(self) -> bool:
        """Whether every row has the same length. Only ``true`` counts: 1 does not."""
        return self.dataset_pads_to_max is True or self.kwargs_pad_to_max is True

    @property
    def reset_by_fsdp(self) -> bool:
        """Whether Megatron-FSDP takes ``average_in_collective`` back before it is looked at."""
        return self.megatron_fsdp and self.megatron_fsdp_version == 1 and not self.no_symmetric_registration

    @property
    def averages(self) -> bool:
        """``average_in_collective``, as it is when it matters."""
        return self.averages_in_collective and not self.reset_by_fsdp

    @property
    def mtp_layers(self) -> int:
        """Layers of multi-token prediction: as given, else as the model's config.json says."""
        if self.given_mtp is MISSING:
            return self.known.mtp_layers if self.known else 0
        return self.given_mtp if isinstance(self.given_mtp, int) else 0

    @property
    def length(self) -> int:
        """The sequence length that the data has, or the model's where the dataset states none."""
        return self.seq_length or self.model_seq_length


PATHS: Final[Mapping[str, str]] = {
    field.name: field.metadata["path"] for field in dataclasses.fields(Settings) if "path" in field.metadata
}
"""Where each field of :class:`Settings` stands in a configuration."""


def needed_multiple(cp: int, tp: int, sequence_parallel: bool) -> int:
    """What the length of a sequence has to be a multiple of.

    CP cuts a sequence into 2 * CP slices, two a rank; sequence parallel cuts what a CP rank holds into TP parts.

    Returns:
        ``lcm(2 * CP where CP > 1, CP * TP with sequence parallel)``.
    """
    return math.lcm(2 * cp if cp > 1 else 1, cp * tp if sequence_parallel and tp > 1 else 1)


def misspelt(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys that look like a misspelling of one that is read, with the one that was probably meant."""
    from difflib import get_close_matches

    found = []
    paths = set(PATHS.values())
    for section in sorted({path.rpartition(".")[0] for path in paths}):
        inside: Any = lookup(mapping, section) if section else mapping
        if not isinstance(inside, Mapping):
            continue
        known = {path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == section}
        known |= {path.split(".")[0] for path in paths if not section}
        for key in inside:
            near = get_close_matches(str(key), known - set(inside), n=1, cutoff=0.9)
            if key not in known and near:
                dot = f"{section}." if section else ""
                found.append((f"{dot}{key}", f"{dot}{near[0]}"))
    return found


def _require_sections(mapping: Mapping[str, Any]) -> None:
    parents = {path.rpartition(".")[0] for path in PATHS.values()} - {""}
    for path in sorted(parents):
        value = lookup(mapping, path)
        if value is not MISSING and value is not None and not isinstance(value, Mapping):
            raise _refuse(path, value, "a section of keys and values")


def _kind_of(mapping: Mapping[str, Any]) -> str:
    target = lookup(mapping, "dataset._target_")
    if isinstance(target, str) and (kind := _KIND_OF_CLASS.get(target.rsplit(".", 1)[-1])):
        return kind
    raise UsageError(
        "cannot tell what kind of dataset the configuration has",
        "dataset.kind is not given, and the rules differ from kind to kind",
        f"set dataset.kind to one of {', '.join(KINDS)}",
        code="packing.no_kind",
    )
