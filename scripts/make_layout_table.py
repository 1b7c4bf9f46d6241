"""Make ``spec/layouts.json``: what transformers' dense decoders declare and how their checkpoints look.

An architecture that transformers has no class for is compared with these (:mod:`onboard.spec.recognise`). Each entry
comes from the class itself: the fields that its config declares, and the tensors of a tiny model with their shapes in
letters, once with the class's defaults and once for each switch that adds or takes away tensors.

    python scripts/make_layout_table.py            all of them (half a minute)
    python scripts/make_layout_table.py llama      print these
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from onboard.reference.build import build, disk_tensors, find_class, try_out
from onboard.reference.meanings import size, spelling
from onboard.reference.tiny import SEQUENCE, candidates
from onboard.spec.keys import SIZES
from onboard.spec.kind import classify
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TARGET = Path(__file__).parents[1] / "generator" / "onboard" / "spec" / "layouts.json"
# Fields of every config; a value there says nothing about the class.
_BASE = set(transformers.PretrainedConfig.__dataclass_fields__)


def layout(model_type: str, architecture: str) -> dict[str, Any] | None:
    """One entry of the table; None where the class is no dense decoder that can be built at tiny size."""
    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    default = config_class()
    raw = {**json.loads(default.to_json_string(use_diff=False)), "architectures": [architecture]}
    if classify(raw).kind != "dense":
        return None
    cls = find_class(architecture, model_type)
    fields = _tiny(cls, default)
    if fields is None:
        return None
    fields["tie_word_embeddings"] = False
    tensors = _disk(cls, fields)
    switches = {}
    for name, value in fields.items():
        if isinstance(value, bool) and name not in _BASE:
            try:
                other = _disk(cls, {**fields, name: not value})
            except Exception:  # a switch that needs other fields to follow
                continue
            if other != tensors:
                switches[name] = {
                    "is": value,
                    "adds": {key: shape for key, shape in other.items() if tensors.get(key) != shape},
                    "removes": sorted(tensors.keys() - other.keys()),
                }
    try:
        tied = _disk(cls, {**fields, "tie_word_embeddings": True})
    except Exception:
        tied = tensors
    declared = config_class.__dataclass_fields__
    return {
        "architecture": architecture,
        "config_class": config_class.__name__,
        "fields": {
            name: _plain(getattr(default, name, None))
            for name in sorted(declared)
            if not name.startswith("_") and name not in _BASE - {"tie_word_embeddings"}
        },
        "attribute_map": dict(default.attribute_map),
        "sizes": {name: key for name in SIZES if (key := spelling(default, name))},
        "computed": sorted(
            name
            for name in SIZES
            if (key := spelling(default, name)) and getattr(declared[key], "default", None) is None
        ),
        "tensors": tensors,
        "switches": switches,
        "tied_leaves_out": sorted(tensors.keys() - tied.keys()),
        "formula": _formula(cls, default),
    }


@torch.no_grad()
def _formula(cls: Any, default: Any) -> str | None:
    """A number that classes share which compute the same from the same weights, at settings that all of them have.

    Everything particular to a class stays at its default. None where the class does not take these settings.
    """
    settings = {
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 72,
        "vocab_size": 151,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }
    fields = {key: value for name, value in settings.items() if (key := spelling(default, name))}
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False}
    fields |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if "rope_parameters" not in type(default).__dataclass_fields__:
        del fields["rope_parameters"]
    try:
        model = build(cls, fields)
        logits = model(torch.arange(3, 3 + SEQUENCE).unsqueeze(0), use_cache=False).logits
    except Exception:
        return None
    return f"{float(logits.double().square().mean().sqrt()):.4f}"


def _tiny(cls: Any, default: Any) -> dict[str, Any] | None:
    for fields in candidates(default):
        try:
            try_out(build(cls, fields), SEQUENCE)
            causal = _is_causal(build(cls, fields))
        except Exception:
            continue
        return fields if causal else None
    return None


@torch.no_grad()
def _is_causal(model: torch.nn.Module) -> bool:
    """Whether earlier positions are the same whatever the last token is; encoders fail."""
    ids = torch.arange(3, 3 + SEQUENCE).unsqueeze(0)
    other = ids.clone()
    other[:, -1] = 3
    one, two = (model(which, use_cache=False).logits[:, :-1] for which in (ids, other))
    return bool(torch.allclose(one, two, atol=1e-4))


def _disk(cls: Any, fields: Mapping[str, Any]) -> dict[str, list[str]]:
    """The patterns of its tensors with their shapes in letters."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(cls, fields)
        found = disk_tensors(model, Path(folder))
    config = model.config
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads") or 1
    kv_heads = size(config, "num_key_value_heads") or heads
    head_dim = size(config, "head_dim") or hidden // heads
    width = size(config, "intermediate_size") or 0
    sizes = {"V": size(config, "vocab_size"), "H": hidden, "N": heads, "K": kv_heads, "D": head_dim, "F": width}
    out: dict[str, list[str]] = {}
    for name, shape in found.items():
        pattern = re.sub(r"\.\d+\.", ".{layer}.", name, count=1)
        out.setdefault(pattern, [_letters(one, sizes) for one in shape])
    return out


def _letters(value: int, s: Mapping[str, int]) -> str:
    """A tiny size in letters. Where two mean the same, the first; a number that none gives stays a number."""
    words = {
        "V": s["V"],
        "H": s["H"],
        "F": s["F"],
        "2F": 2 * s["F"],
        "ND": s["N"] * s["D"],
        "KD": s["K"] * s["D"],
        "D": s["D"],
        "ND+2KD": (s["N"] + 2 * s["K"]) * s["D"],
        "3ND": 3 * s["N"] * s["D"],
        "4H": 4 * s["H"],
        "N": s["N"],
    }
    return next((word for word, number in words.items() if number == value), str(value))


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else "..."


def main() -> None:
    """Print the named entries, or write all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    named = sys.argv[1:]
    table = {}
    for model_type in named or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            found = layout(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        except Exception as error:
            print(f"{model_type}: {type(error).__name__}: {error}".splitlines()[0][:160], file=sys.stderr, flush=True)
            continue
        if found is not None:
            table[model_type] = found
            print(f"{model_type}: {len(found['tensors'])} kinds of tensors", file=sys.stderr, flush=True)
    if named:
        print(json.dumps(table, indent=1))
        return
    content = {"made_from": f"transformers {transformers.__version__}", "classes": table}
    lines = [f' "{name}": {json.dumps(entry, sort_keys=True)}' for name, entry in sorted(table.items())]
    text = f'{{"made_from": {json.dumps(content["made_from"])}, "classes": {{\n' + ",\n".join(lines) + "\n}}\n"
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
