"""The subprocess: builds the tiny reference, confirms a hypothesis for each of its parts, prints JSON.

``python -m onboard.reference.probe < request.json``; the request is ``{"architecture", "model_type", "config",
"style"}``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# One thread: the tensors are tiny. Set before torch starts its pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from onboard._child import answer_stream, bound_memory
from onboard.errors import OnboardError
from onboard.reference.attentions import Fit, explain_attention
from onboard.reference.blocks import explain_block, explain_dropout, explain_embedding, explain_head
from onboard.reference.build import NoReference, build, consumed_keys, disk_tensors, find_class, read_config, try_out
from onboard.reference.checks import check_keys, check_values
from onboard.reference.fields import live_fields
from onboard.reference.meanings import read, size
from onboard.reference.mlps import explain_mlp
from onboard.reference.norms import explain_norms
from onboard.reference.record import Recording, record
from onboard.reference.reuse import measure_reuse
from onboard.reference.roles import Roles, Unexplained, find_roles, is_norm
from onboard.reference.ropes import STATIC_SCALINGS, explain_tables
from onboard.reference.tiny import SEQUENCE, WINDOW, candidates
from onboard.spec.keys import SIZES, data_keys

MEMORY_BYTES = 8 * 1024**3
# Keys that transformers writes in another form than old files have them.
_RESPELT = frozenset(("architectures", "torch_dtype", "dtype", "transformers_version", "rope_scaling", "_name_or_path"))


def probe(architecture: str, model_type: str | None, raw: dict[str, Any]) -> dict[str, Any]:
    """Measure the reference.

    Returns:
        What :mod:`onboard.spec.derive` turns into an ArchSpec; see the keys below.

    Raises:
        NoReference: transformers cannot build this architecture.
        Unexplained: a part that no hypothesis explains.
        OnboardError: a key or value that no decoder can have.
    """
    cls = find_class(architecture, model_type)
    check_keys(cls.config_class, raw)
    real = read_config(cls, raw)
    check_values(real)
    fields, model = _tiny_model(cls, real)
    input_ids = torch.randint(3, model.config.vocab_size, (1, SEQUENCE), generator=torch.Generator().manual_seed(7))
    recording, logits = record(model, input_ids=input_ids)
    roles = find_roles(model, recording)
    head_dim = _head_dim(model.config)
    layers = range(model.config.num_hidden_layers)
    window = size(model.config, "sliding_window")
    fits = [_fit(model, roles, recording, index, head_dim, window) for index in layers]
    windowed_fields = _windowed(fields)
    windowed = fits if windowed_fields is None else _windowed_fits(cls, windowed_fields, roles, input_ids, head_dim)
    norms = {
        name: module
        for name, module in model.named_modules()
        if is_norm(module) and name in recording and (name == roles.final_norm or name.startswith(f"{roles.layers}."))
    }
    blocks = [explain_block(model.get_submodule(roles.layer(index)), index, roles, recording) for index in layers]
    if len({str({**block, "difference": 0}) for block in blocks}) > 1:
        raise Unexplained("block", "layers differ in the order of their norms")
    mlp_paths = [f"{roles.layer(index)}.{roles.mlp}" for index in layers]
    mlps = [explain_mlp(model.get_submodule(path), path, recording, model.config) for path in mlp_paths]
    if len({str({**mlp, "difference": 0}) for mlp in mlps}) > 1:
        raise Unexplained("mlp", "layers differ in their MLPs")
    return {
        "transformers": transformers.__version__,
        "reference_class": cls.__name__,
        "config_class": cls.config_class.__name__,
        "tiny": fields,
        "real": _real(cls, real, raw),
        "roles": {
            name: getattr(roles, name) for name in ("embedding", "layers", "final_norm", "head", "attention", "mlp")
        },
        "norm": explain_norms(norms, model.config),
        "mlp": mlps[0] | {"difference": max(mlp["difference"] for mlp in mlps)},
        "attention": _attention(model, roles, fits, windowed, windowed_fields),
        "rope": explain_tables(model.config, _tables(model, roles, recording), head_dim)
        | {"served": _served_ropes(cls, fields, roles, input_ids, head_dim)},
        "block": blocks[0]
        | explain_dropout(model.get_submodule(roles.layer(0)), roles, model.config)
        | {"difference": max(block["difference"] for block in blocks)},
        "embedding": explain_embedding(model, input_ids, roles, recording),
        "head": _head(cls, fields, explain_head(model, logits, roles, recording), roles, input_ids),
        "live": live_fields(cls, fields, input_ids),
        **_checkpoint(cls, fields),
    }


def reuse(
    architecture: str, model_type: str | None, raw: dict[str, Any], problem: dict[str, Any] | None
) -> dict[str, Any]:
    """Measure what a package needs that reuses the reference's modules; see :func:`.reuse.measure_reuse`.

    Raises:
        NoReference: as :func:`probe`.
        Unexplained: the tiny model cannot be built, or its checkpoint's layout is not understood.
    """
    cls = find_class(architecture, model_type)
    check_keys(cls.config_class, raw)
    real = read_config(cls, raw)
    check_values(real)
    fields, _ = _tiny_model(cls, real)
    return {
        "transformers": transformers.__version__,
        "reference_class": cls.__name__,
        "config_class": cls.config_class.__name__,
        "tiny": fields,
        "real": _real(cls, real, raw),
        "problem": problem,
        "reuse": measure_reuse(cls, real, fields, problem),
    }


def _tiny_model(cls: type[PreTrainedModel], real: PretrainedConfig) -> tuple[dict[str, Any], PreTrainedModel]:
    """The first tiny config that the reference can build and run."""
    problems = []
    for fields in candidates(real):
        try:
            try_out(build(cls, fields), SEQUENCE)
            model = build(cls, fields)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        return fields, model
    raise Unexplained("tiny config", f"{cls.__name__} cannot be built at tiny size", tuple(problems))


def _head_dim(config: PretrainedConfig) -> int:
    heads = size(config, "num_attention_heads")
    if heads is None:
        raise Unexplained("attention", f"{type(config).__name__} counts no heads")
    return int(size(config, "head_dim") or size(config, "hidden_size") // heads)


def _fit(
    model: PreTrainedModel, roles: Roles, recording: Recording, index: int, head_dim: int, window: int | None
) -> Fit:
    path = f"{roles.layer(index)}.{roles.attention}"
    fit: Fit = explain_attention(model.get_submodule(path), path, recording, model.config, head_dim, window)
    return fit


def _windowed(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The tiny config with a sliding window on, where the class has one; None where it is on already or unknown."""
    if "sliding_window" not in fields or fields["sliding_window"] is not None:
        return None
    on = {**fields, "sliding_window": WINDOW}
    if "use_sliding_window" in on:
        on["use_sliding_window"] = True
    if on.get("layer_types"):
        kinds = ("sliding_attention", "full_attention")
        on["layer_types"] = [kinds[index % 2] for index in range(on["num_hidden_layers"])]
    return on


def _windowed_fits(
    cls: type[PreTrainedModel], fields: dict[str, Any], roles: Roles, input_ids: torch.Tensor, head_dim: int
) -> list[Fit]:
    model = build(cls, fields)
    recording, _ = record(model, input_ids=input_ids)
    return [_fit(model, roles, recording, index, head_dim, WINDOW) for index in range(model.config.num_hidden_layers)]


def _attention(
    model: PreTrainedModel, roles: Roles, fits: list[Fit], windowed: list[Fit], windowed_fields: dict[str, Any] | None
) -> dict[str, Any]:
    if len({str(fit.names) + fit.scale for fit in fits}) > 1:
        raise Unexplained("attention", "layers differ in their projections or scales")
    styles = {fit.style for fit in fits} - {"none"}
    if styles != {"half"}:
        raise Unexplained("attention", f"rotation {sorted(styles) or 'none'}", ("half",))
    attention = model.get_submodule(f"{roles.layer(0)}.{roles.attention}")
    names = fits[0].names
    ins = [names["fused_qkv"]] if names["fused_qkv"] else [names[f"{part}_proj"] for part in "qkv"]
    biases = {name: attention.get_submodule(name).bias is not None for name in ins}
    if len(set(biases.values())) > 1:
        raise Unexplained("attention", f"some of q, k and v have a bias and some have not: {biases}")
    return {
        **names,
        "qkv_bias": all(biases.values()),
        "o_bias": attention.get_submodule(names["o_proj"]).bias is not None,
        "scale": fits[0].scale,
        "rope_layers_key": _rope_layers_key(model.config, [fit.style != "none" for fit in fits]),
        **_window(fits, windowed, windowed_fields, model.config),
        "windowed_fields": windowed_fields,
        "difference": max(fit.difference for fit in fits),
    }


def _head(
    cls: type[PreTrainedModel], fields: dict[str, Any], found: dict[str, Any], roles: Roles, input_ids: torch.Tensor
) -> dict[str, Any]:
    """Try a cap on the logits where the config class has a field for one that this model leaves empty."""
    for name, value in fields.items():
        if "logit_softcap" in name and value is None and found["softcap_key"] is None:
            model = build(cls, {**fields, name: 2.0})
            recording, logits = record(model, input_ids=input_ids)
            found = explain_head(model, logits, roles, recording)
    return found


def _rope_layers_key(config: PretrainedConfig, rotated: list[bool]) -> str | None:
    if all(rotated):
        return None
    fields: dict[str, Any] = vars(config)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == len(rotated) and [bool(item) for item in value] == rotated:
            return name
    raise Unexplained("rope", f"layers that rotate: {rotated}, and no config field says so")


def _window(
    fits: list[Fit], windowed: list[Fit], windowed_fields: dict[str, Any] | None, config: PretrainedConfig
) -> dict[str, Any]:
    flags = [fit.windowed for fit in windowed]
    if not any(flags):
        return {"window_key": None, "window_layers": None}
    types = windowed_fields.get("layer_types") if windowed_fields else getattr(config, "layer_types", None)
    if types and flags == [kind == "sliding_attention" for kind in types]:
        return {"window_key": "sliding_window", "window_layers": "by_layer_type"}
    if all(flags):
        return {"window_key": "sliding_window", "window_layers": "all"}
    raise Unexplained("attention", f"layers with a window: {flags}, layer_types: {types}")


def _tables(model: PreTrainedModel, roles: Roles, recording: Recording) -> dict[str, Any]:
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    tables = {}
    for index, layer_type in enumerate(types):
        tables[layer_type] = recording[f"{roles.layer(index)}.{roles.attention}"].inputs["position_embeddings"]
    return tables


def _served_ropes(
    cls: type[PreTrainedModel], fields: dict[str, Any], roles: Roles, input_ids: torch.Tensor, head_dim: int
) -> dict[str, Any]:
    """Other static scalings that the reference takes, each with the ``rope_parameters`` that were tried.

    Where layer types have parameters of their own, those of the full attention are scaled, as published models do.
    """
    rope = fields["rope_parameters"]
    nested = isinstance(rope.get("full_attention"), dict)
    base = rope["full_attention"] if nested else rope
    kept = {name: base[name] for name in ("rope_theta", "partial_rotary_factor") if name in base}
    served = {}
    for rope_type, extra in STATIC_SCALINGS.items():
        if rope_type == base["rope_type"]:
            continue
        parameters: dict[str, Any] = {"rope_type": rope_type, **kept, **extra}
        if nested:
            parameters = {**rope, "full_attention": parameters}
        try:
            model = build(cls, {**fields, "rope_parameters": parameters})
            if model.config.rope_parameters != parameters:
                continue  # the config class makes another scaling of it
            recording, _ = record(model, input_ids=input_ids)
            explain_tables(model.config, _tables(model, roles, recording), head_dim)
        except Exception:
            continue
        served[rope_type] = parameters
    return served


def _real(cls: type[PreTrainedModel], real: PretrainedConfig, raw: dict[str, Any]) -> dict[str, Any]:
    """What the spec needs to know of the real model, as transformers reads its config."""
    names = (
        *SIZES,
        "layer_types",
        "sliding_window",
        "rope_parameters",
        "tie_word_embeddings",
    )
    known = {name: size(real, name) if name in SIZES else read(real, name) for name in names}
    declared = {field.name for field in dataclasses.fields(real)}
    # The class keeps keys that it does not know as attributes, and takes those that it does know apart.
    kept = set(vars(real)) - declared
    known["fields"] = sorted(
        declared
        | set(real.attribute_map)
        | {"partial_rotary_factor"}
        | (set(data_keys(raw)) - kept)
        | consumed_keys(cls, raw)
    )
    known["values"] = {
        name: read(real, name)
        for name in type(real).__dataclass_fields__
        if isinstance(read(real, name), (bool, int, float, str, type(None)))
    }
    written = json.loads(real.to_json_string(use_diff=False))
    # What the config class makes of a value on purpose: a window that another key switches off is read as None.
    known["normalised"] = {
        name: written[name]
        for name, value in raw.items()
        if name in written and value is not None and written[name] != value and name not in _RESPELT
    }
    return known


def _checkpoint(cls: type[PreTrainedModel], fields: dict[str, Any]) -> dict[str, Any]:
    """Names on disk and in memory of the untied model, and which of them a tied one leaves out."""
    layouts = {}
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            model = build(cls, {**fields, "tie_word_embeddings": tied})
            layouts[tied] = disk_tensors(model, Path(folder))
            if not tied:
                native = sorted(model.state_dict())
    return {
        "disk": layouts[False],
        "native": native,
        "tied_leaves_out": sorted(set(layouts[False]) - set(layouts[True])),
    }


def answer(request: Mapping[str, Any]) -> str:
    """The JSON that answers a request: what was measured, or the error.

    ``style`` says what to measure: ``native`` the parts of the model, ``reuse`` what a package needs that reuses
    them, and
    ``auto`` the latter where the former fails.
    """
    named = (request["architecture"], request["model_type"], request["config"])
    style = request.get("style", "native")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return json.dumps(probe(*named) if style != "reuse" else reuse(*named, request.get("problem")))
    except NoReference as error:
        refusal: dict[str, Any] = {"error": "no_reference", "what": str(error)}
    except Unexplained as error:
        refusal = {"error": "unexplained", "part": error.part, "what": error.what, "nearest": list(error.nearest)}
    except OnboardError as error:
        refusal = {"error": "refused", "exit_status": error.exit_status, **error.as_json()}
    except Exception as error:
        traceback.print_exc()
        refusal = {"error": "failed", "what": f"{type(error).__name__}: {error}"[:300]}
    if style == "auto" and refusal["error"] in ("unexplained", "failed"):
        problem = {"part": "architecture", "nearest": [], **refusal}
        second = answer({**request, "style": "reuse", "problem": problem})
        if "error" not in json.loads(second):
            return second
    return json.dumps(refusal)


def main() -> None:
    """Read the request, write the answer."""
    torch.set_num_threads(1)
    bound_memory(MEMORY_BYTES)
    written = answer(json.load(sys.stdin))
    with answer_stream() as stream:
        stream.write(written)


if __name__ == "__main__":
    main()
