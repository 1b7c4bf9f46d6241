"""The subprocess: builds the tiny reference, confirms a hypothesis for each of its parts, prints JSON.

``python -m onboard.reference.probe < request.json``; the request is ``{"architecture", "model_type", "config",
"style"}``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
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
from onboard.reference.attention.explain import explain_attentions
from onboard.reference.attention.fit import fit_layers
from onboard.reference.attention.latent import explain_latents
from onboard.reference.blocks import explain_blocks
from onboard.reference.build import (
    NoClass,
    NoReference,
    build,
    consumed_keys,
    disk_tensors,
    find_class,
    names_on_disk,
    read_config,
    try_out,
)
from onboard.reference.checks import check_keys, check_values
from onboard.reference.dropouts import explain_dropouts
from onboard.reference.ends import (
    explain_embedding,
    explain_head,
    initial_std,
    is_cap,
    pads,
    rounds_scale,
    settle_activation,
)
from onboard.reference.fields import live_fields
from onboard.reference.meanings import read, size
from onboard.reference.mixers import explain_mixer
from onboard.reference.mlps import explain_mlps
from onboard.reference.norms import explain_norms, settle_eps
from onboard.reference.record import record
from onboard.reference.remote import BrokenCode, load_remote
from onboard.reference.reuse import measure_reuse
from onboard.reference.roles import Roles, Unexplained, find_roles
from onboard.reference.support import fresh_loss
from onboard.reference.tiny import SEQUENCE, candidates, left_dense
from onboard.spec.keys import SIZES, data_keys

SHORT = 10
"""Tokens of a sequence that is shorter than the tiny original length of a RoPE scaling, and longer than a window."""
MEMORY_BYTES = 8 * 1024**3
# Keys that transformers writes in another form than old files have them.
_RESPELT = frozenset(("architectures", "torch_dtype", "dtype", "transformers_version", "rope_scaling", "_name_or_path"))


def probe(
    architecture: str, model_type: str | None, raw: dict[str, Any], own_class: type[PreTrainedModel] | None = None
) -> dict[str, Any]:
    """Measure the reference.

    Args:
        architecture: name of the architecture.
        model_type: config.json's ``model_type``.
        raw: config.json.
        own_class: the class of the model's own code; None for transformers'.

    Returns:
        What :mod:`onboard.spec.derive` turns into an ArchSpec; see the keys below.

    Raises:
        NoReference: transformers cannot build this architecture.
        Unexplained: a part that no hypothesis explains.
        OnboardError: a key or value that no decoder can have.
    """
    cls = own_class or find_class(architecture, model_type)
    check_keys(cls.config_class, raw)
    real = read_config(cls, raw)
    check_values(real)
    fields, model = _tiny_model(cls, real)
    input_ids = torch.randint(3, model.config.vocab_size, (1, SEQUENCE), generator=torch.Generator().manual_seed(7))
    recording, logits = record(model, input_ids=input_ids)
    roles = find_roles(model, recording)
    attention = explain_attentions(cls, fields, model, roles, recording, input_ids)
    if attention["rope"] and {"dynamic", "longrope"} & set(attention["rope"]["types"]):
        # Their frequencies follow the length: what explains a long sequence has to explain a short one, too.
        short, _ = record(build(cls, fields), input_ids=input_ids[:, :SHORT])
        if attention["attention"].get("latent"):
            explain_latents(model, roles, short)
        else:
            fit_layers(model, roles, short)
    mlp = explain_mlps(cls, fields, model, roles, recording, input_ids)
    mixer = explain_mixer(cls, fields, model, roles, input_ids)
    blocks = explain_blocks(model, roles, recording)
    embedding = explain_embedding(model, input_ids, roles, recording)
    head = {"reference": roles.head, "native": ["lm_head"], "transposed": False, "groups": "1"}
    norm = {"reference": roles.final_norm, "native": ["model.norm"], "transposed": False, "groups": "1"}
    last = settle_activation(cls, fields, explain_head(model, logits, roles, recording), roles, input_ids)
    transform = last["transform"] or {"modules": []}
    parts = (embedding, blocks, attention, mixer, mlp, transform)
    modules = [entry for part in parts for entry in part["modules"]] + [norm] * bool(roles.final_norm) + [head]
    inside = (f".{mixer['mixer']['name']}.",) if mixer["mixer"] else ()
    norms, width = _norms(model, modules, inside), model.config.hidden_size
    formula = settle_eps(cls, fields, explain_norms(norms, width, model.config), norms, width)
    dropouts = explain_dropouts(cls, fields, roles, blocks, input_ids)
    return {
        "transformers": transformers.__version__,
        "reference_class": cls.__name__,
        "config_class": cls.config_class.__name__,
        "tiny": fields,
        "tiny_sizes": {name: size(model.config, name) for name in SIZES},
        "real": _real(cls, real, raw) | {"error": _real_error(cls, real)},
        "roles": {
            **{
                name: getattr(roles, name)
                for name in ("embedding", "layers", "final_norm", "head", "attention", "mixer", "mlp")
            },
            "attention_layers": list(roles.attention_layers),
        },
        "modules": modules,
        "norm": formula,
        "final_norm": roles.final_norm is not None,
        "mlp": mlp["mlp"],
        "attention": attention["attention"],
        "rope": attention["rope"],
        "block": blocks["block"],
        "mixer": mixer["mixer"] and mixer["mixer"] | {"block": blocks["mixer_block"]},
        "dropouts": dropouts,
        "embedding": embedding["embedding"]
        | {
            "padding": pads(cls, fields),
            "initial_std": initial_std(cls, fields),
            "rounds_scale": rounds_scale(cls, fields, embedding["embedding"], roles, input_ids),
        },
        "head": _head(cls, fields, last, roles, input_ids),
        "live": live_fields(cls, fields, input_ids) | _experts(real, fields),
        "fresh_loss": round(fresh_loss(cls, fields, input_ids), 2),
        **_checkpoint(cls, fields, modules),
    }


def _norms(
    model: PreTrainedModel, modules: list[dict[str, Any]], mixers: tuple[str, ...] = ()
) -> dict[str, torch.nn.Module]:
    """The norms that share one formula: the layers', the final one and the embedding's."""
    inside = (".self_attn.", ".mlp.", *mixers)
    paths = {path for path, _ in model.named_modules()}
    out = {}
    for entry in modules:
        native = entry["native"][0]
        if native.endswith("norm") and native != "head_norm" and not any(part in native for part in inside):
            for layer in range(model.config.num_hidden_layers) if "{layer}" in native else (0,):
                path = entry["reference"].replace("{layer}", str(layer))
                if path in paths and not isinstance(model.get_submodule(path), torch.nn.Identity):
                    out[path] = model.get_submodule(path)
    return out


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
    fields, model = _tiny_model(cls, real)
    try:
        model(torch.ones((1, 4), dtype=torch.long))
    except Exception:  # a state of earlier tokens that transformers cannot keep for these layers
        fields = {**fields, "use_cache": False}
    return {
        "transformers": transformers.__version__,
        "reference_class": cls.__name__,
        "config_class": cls.config_class.__name__,
        "tiny": fields,
        "real": _real(cls, real, raw) | {"error": _real_error(cls, real)},
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


def _head(
    cls: type[PreTrainedModel], fields: dict[str, Any], found: dict[str, Any], roles: Roles, input_ids: torch.Tensor
) -> dict[str, Any]:
    """Try a cap on the logits where the config class has a field for one that this model leaves empty."""
    for name, value in fields.items():
        if is_cap(name) and "attn" not in name and value is None and found["softcap_key"] is None:
            model = build(cls, {**fields, name: 2.0})
            recording, logits = record(model, input_ids=input_ids)
            found = explain_head(model, logits, roles, recording)
    return found


def _experts(real: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Counts of experts that are empty: with them, layers that are dense here would have a router and experts."""
    return {name: {"effect": "parameters", "added": [], "removed": [], "other": 4} for name in left_dense(real, fields)}


def _real_error(cls: type[PreTrainedModel], real: PretrainedConfig) -> str | None:
    """Why the reference cannot build the model at its real size, without memory; None where it can."""
    try:
        with torch.device("meta"):
            cls(copy.deepcopy(real))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


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
    known["lists"] = {
        name: value
        for name in (*type(real).__dataclass_fields__, *vars(real))
        if isinstance(value := read(real, name), list) and len(value) == known["num_hidden_layers"]
    }
    known["attribute_map"] = dict(real.attribute_map)
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


def _checkpoint(cls: type[PreTrainedModel], fields: dict[str, Any], modules: list[dict[str, Any]]) -> dict[str, Any]:
    """Names on disk and in memory of the untied model, and which of them a tied one leaves out.

    Raises:
        Unexplained: a parameter of a module that has no part in the decoder, or that the checkpoint holds otherwise.
    """
    layouts, named = {}, {}
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            model = build(cls, {**fields, "tie_word_embeddings": tied})
            layouts[tied] = disk_tensors(model, Path(folder))
            if not tied:
                named = {name: list(tensor.shape) for name, tensor in model.named_parameters()}
                renamed = names_on_disk(model, Path(folder))
                patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
                prefix = model.base_model_prefix
    _check_modules(named, modules)
    if relaid := [name for name in named if name not in renamed]:
        raise Unexplained("layout", f"the checkpoint holds {relaid[0]} in parts, or in another layout")
    return {
        "disk": layouts[False],
        "native": sorted(named),
        "disk_of": {name: disk for name, disk in renamed.items() if name != disk},
        "tied_leaves_out": sorted(set(layouts[False]) - set(layouts[True])),
        "own_eager": _own_eager(cls),
        "sdpa": bool(getattr(cls, "_supports_sdpa", False)),
        "ignored_patterns": sorted(patterns),
        "base_model_prefix": prefix,
    }


def _own_eager(cls: type[PreTrainedModel]) -> str | None:
    """The reference's module, below ``transformers.models``, where it defines how its attention runs eagerly."""
    prefix = "transformers.models."
    defined = hasattr(sys.modules[cls.__module__], "eager_attention_forward")
    return cls.__module__.removeprefix(prefix) if defined and cls.__module__.startswith(prefix) else None


def _check_modules(parameters: Mapping[str, Any], modules: list[dict[str, Any]]) -> None:
    references = {entry["reference"] for entry in modules}
    for name in parameters:
        pattern = re.sub(r"\.\d+\.", ".{layer}.", name, count=1)
        if pattern not in references and pattern.rpartition(".")[0] not in references:
            raise Unexplained("layout", f"the parameter {name} has no part in the decoder that was explained")


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
            with tempfile.TemporaryDirectory() as folder:
                code = request.get("code")
                own_class = load_remote(code, Path(folder)) if code else None
                reused = style == "reuse" and not code
                found = reuse(*named, request.get("problem")) if reused else probe(*named, own_class)
            return json.dumps(found)
    except BrokenCode as error:
        refusal: dict[str, Any] = {"error": "broken_code", "what": str(error)}
    except NoClass as error:
        refusal = {"error": "no_class", "what": str(error)}
    except NoReference as error:
        refusal = {"error": "no_reference", "what": str(error)}
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
