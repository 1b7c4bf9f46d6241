"""``onboard packing plan``: a configuration that keeps every rule and steps into no trap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onboard.errors import OnboardError, Unsupported, UsageError
from onboard.packing.checking import check
from onboard.packing.families import Known, Packing
from onboard.packing.rules import round_up
from onboard.packing.settings import Settings, needed_multiple

_LEAST_ROWS: Final = 2
"""Rows of a micro batch that in-batch packing needs at least."""


@dataclass(frozen=True)
class Request:
    """What is to be trained, and how it is laid out.

    Attributes:
        known: the model.
        tp, cp, pp, ep: tensor, context, pipeline and expert parallel sizes.
        sequence_parallel: whether sequence parallel is on.
        seq_length: the longest sample, in tokens.
        global_batch_size: rows of ``seq_length`` tokens a step.
        micro_batch_size: rows that are packed into one; for in-batch packing only.
        world_size: processes; TP * PP * CP where None.
        packing: which kind; decided by the kind of model where None.
        pack_size: tokens of a packed row, for offline packing; the sequence length where None.
        dataset: the kind of dataset of in-batch packing.
        peft: the adapter, such as ``lora``; full fine-tuning where None.
    """

    known: Known
    seq_length: int
    global_batch_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    micro_batch_size: int | None = None
    world_size: int | None = None
    packing: Packing | None = None
    pack_size: int | None = None
    dataset: str = "hf_sft"
    peft: str | None = None


@dataclass(frozen=True)
class Plan:
    """A configuration for packing.

    Attributes:
        mapping: its sections, which pass ``check --strict``.
        packing: the kind of packing.
        computed: the numbers that follow from the layout.
        notes: what differs from what was asked for, and why.
    """

    mapping: Mapping[str, Any]
    packing: Packing
    computed: Mapping[str, Any]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The JSON of ``onboard packing plan``."""
        return {
            "packing": self.packing,
            "config": dict(self.mapping),
            "computed": dict(self.computed),
            "notes": list(self.notes),
            "python": as_python(self),
        }


def plan(request: Request) -> Plan:
    """Plan a configuration.

    Raises:
        UsageError: the layout cannot exist.
        Unsupported: the model's family takes no such packing, or the model is none that is packed.
    """
    packing = _packing(request)
    world = _world(request)
    _check_experts(request, world)
    notes: list[str] = []
    dp = world // (request.tp * request.pp * request.cp)
    sequence_parallel = _sequence_parallel(request, notes)
    multiple = needed_multiple(request.cp, request.tp, sequence_parallel)
    micro = 1 if packing == "offline" else max(request.micro_batch_size or _LEAST_ROWS, _LEAST_ROWS)
    _note_micro_batch(request, packing, micro, notes)
    wanted = request.pack_size if packing == "offline" and request.pack_size else request.seq_length
    length = round_up(wanted, multiple)
    if length != wanted:
        notes.append(f"the sequence length is {length} in place of {wanted}: a multiple of {multiple} is needed")
    batch = _batch(request, length if request.pack_size else None, micro * dp, notes)
    mapping = _sections(request, packing, world, sequence_parallel, micro, batch, length, multiple)
    if request.known.mtp_layers:
        mapping["model"]["mtp_num_layers"] = None
        notes.append(f"multi-token prediction is off ({request.known.mtp_key}): packing does not support it")
    _refuse_opt_out(request, packing, Settings.read(mapping, request.known))
    verdict = check(mapping, request.known)
    if verdict.findings:
        raise OnboardError(
            "the plan does not pass its own check",
            "; ".join(f"{finding.rule.id}: {finding.mend}" for finding in verdict.findings),
            "please report it with the options that were given",
        )
    computed = {
        "data_parallel_size": dp,
        "pad_multiple": multiple,
        "pad_multiple_is": f"lcm(2*CP, CP*TP) of CP {request.cp}, TP {request.tp if sequence_parallel else 1}",
        "token_slots_per_step": batch * length,
        "micro_batches_per_step": batch // (micro * dp),
    }
    return Plan(mapping, packing, computed, tuple(notes))


def _packing(request: Request) -> Packing:
    known = request.known
    if known.kind == "unsupported":
        raise Unsupported(
            f"{known.label} is not a model that packs its sequences: it is {known.is_}",
            "packing joins the texts of a decoder language model, or the samples of a vision-language model",
            "give the model that is to be fine-tuned",
            is_=known.is_,
        )
    if known.kind is None and request.packing is None:
        raise UsageError(
            f"cannot tell which packing {known.label} takes",
            f"its config.json was not read: {known.by_name}",
            "give --packing offline for text or --packing in-batch for vision-language models, or a local config.json",
            code="packing.unknown_kind",
        )
    natural: Packing = "in-batch" if known.kind == "vlm" else "offline"
    if known.kind == "vlm" and request.packing == "offline":
        raise Unsupported(
            f"{known.label} cannot be packed offline",
            "offline packing joins token ids before training, and images are not part of them",
            "leave --packing out: vision-language models are packed in the batch",
            code="unsupported.packing",
        )
    return request.packing or natural


def _world(request: Request) -> int:
    model = request.tp * request.pp * request.cp
    world = request.world_size or model
    if world % model:
        raise UsageError(
            f"{world} processes do not hold whole models",
            f"one model takes TP*PP*CP = {request.tp}*{request.pp}*{request.cp} = {model} processes",
            f"give --world-size {round_up(world, model)}, or other parallel sizes",
            code="packing.layout",
        )
    return world


def _check_experts(request: Request, world: int) -> None:
    if request.ep == 1:
        return
    experts = request.known.experts
    why = None
    if request.known.kind is not None and not experts:
        why = f"{request.known.label} has no experts to spread"
    elif experts and experts % request.ep:
        why = f"the {experts} experts of {request.known.label} do not spread evenly over {request.ep}"
    elif world % (request.tp * request.pp * request.ep):
        why = f"TP*PP*EP = {request.tp * request.pp * request.ep} does not divide the {world} processes"
    if why:
        raise UsageError(
            f"--ep {request.ep} does not fit", why, "give another --ep or --world-size", code="packing.layout"
        )


def _sequence_parallel(request: Request, notes: list[str]) -> bool:
    if request.sequence_parallel and request.tp == 1:
        notes.append("sequence parallel is off: with TP 1 there is nothing to split, and Megatron-Core resets it")
        return False
    if request.tp > 1 and request.ep > 1 and not request.sequence_parallel:
        notes.append("sequence parallel is on: Megatron-Core needs it where both TP and EP are above 1")
        return True
    return request.sequence_parallel


def _note_micro_batch(request: Request, packing: Packing, micro: int, notes: list[str]) -> None:
    given = request.micro_batch_size
    if given is None or given == micro:
        return
    if packing == "offline":
        notes.append(f"the micro batch is 1 in place of {given}: a packed row is a batch of its own")
    else:
        notes.append(f"the micro batch is {micro} in place of {given}: with one row there is nothing to pack")


def _batch(request: Request, pack: int | None, unit: int, notes: list[str]) -> int:
    """Rows a step: as many token slots as were asked for, rounded up to whole rows on every rank."""
    slots = request.global_batch_size * request.seq_length
    rows = request.global_batch_size if pack is None else -(-slots // pack)
    batch = round_up(rows, unit)
    if pack is not None and batch != request.global_batch_size:
        notes.append(
            f"the global batch is {batch} rows in place of {request.global_batch_size}: {batch * pack} token slots a "
            f"step, where {slots} were asked for"
        )
    elif batch != request.global_batch_size:
        notes.append(
            f"the global batch is {batch} in place of {request.global_batch_size}: micro batch * data parallel size = "
            f"{unit} has to divide it"
        )
    return batch


def _sections(
    request: Request,
    packing: Packing,
    world: int,
    sequence_parallel: bool,
    micro: int,
    batch: int,
    length: int,
    multiple: int,
) -> dict[str, Any]:
    model = {
        "seq_length": length,
        "tensor_model_parallel_size": request.tp,
        "pipeline_model_parallel_size": request.pp,
        "context_parallel_size": request.cp,
        "expert_model_parallel_size": request.ep,
        "sequence_parallel": sequence_parallel,
        # Each rank counts its own tokens where CP spreads a sequence; where it does not, the default is fine.
        "calculate_per_token_loss": request.cp > 1,
    }
    # Pipeline stages and expert ranks exchange tensors of one shape.
    fixed = request.pp > 1 or request.ep > 1
    dataset: dict[str, Any]
    if packing == "offline":
        specs: dict[str, Any] = {"packed_sequence_size": length, "pad_seq_to_mult": multiple}
        if request.pack_size and request.seq_length < length:
            specs["max_single_sequence_length"] = request.seq_length
        dataset = {
            "kind": "gpt_sft",
            "seq_length": length,
            "enable_offline_packing": True,
            "offline_packing_specs": specs,
            "dataset_kwargs": {"pad_to_max_length": fixed},
        }
    else:
        dataset = {"kind": request.dataset, "seq_length": length, "enable_in_batch_packing": True}
    sections: dict[str, Any] = {
        "world_size": world,
        "train": {"micro_batch_size": micro, "global_batch_size": batch},
        "model": model,
        "dataset": dataset,
        "ddp": {"average_in_collective": False},
    }
    if request.peft:
        sections["peft"] = request.peft
    sections["hf_model"] = request.known.label
    return sections


def _refuse_opt_out(request: Request, packing: Packing, settings: Settings) -> None:
    found = request.known.opt_outs(packing, settings)
    if not found:
        return
    family, opt_out = found[0]
    other = "in-batch" if packing == "offline" else None
    free = other is not None and not request.known.opt_outs("in-batch", settings)
    raise Unsupported(
        f"{request.known.label} takes no {packing} packing: the {family.name} family opts out{opt_out.in_brackets}",
        f"{opt_out.who}; {opt_out.then}",
        "give --packing in-batch, which is not ruled out, or train without packing"
        if free
        else "train without packing",
        code="unsupported.packing",
    )


def as_python(plan: Plan) -> str:
    """The plan as statements on the configuration ``cfg`` of a Megatron-Bridge recipe."""
    mapping = plan.mapping
    dataset = dict(mapping["dataset"])
    specs, kwargs = dataset.pop("offline_packing_specs", None), dataset.pop("dataset_kwargs", None)
    kind = dataset.pop("kind")
    lines = [
        f"# {plan.packing} packing of {mapping['hf_model']!a} on {mapping['world_size']} processes; dataset: {kind}"
    ]
    if specs:
        lines += ["from megatron.bridge.data.packing import PackedSequenceSpecs", ""]
    lines += [f"cfg.train.{key} = {value!r}" for key, value in mapping["train"].items()]
    lines += [f"cfg.model.{key} = {value!r}" for key, value in mapping["model"].items()]
    lines += [f"cfg.dataset.{key} = {value!r}" for key, value in dataset.items()]
    if specs:
        given = ", ".join(f"{key}={value!r}" for key, value in specs.items())
        lines.append(f"cfg.dataset.offline_packing_specs = PackedSequenceSpecs({given})")
    if kwargs:
        lines.append(f"cfg.dataset.dataset_kwargs = {{**(cfg.dataset.dataset_kwargs or {{}}), **{kwargs!r}}}")
    lines += [f"cfg.ddp.{key} = {value!r}" for key, value in mapping["ddp"].items()]
    return "\n".join(lines) + "\n"
