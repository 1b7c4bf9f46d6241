"""Where each field of the spec comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onboard.spec.arch import ArchSpec, Provenance
from onboard.spec.keys import ALIASES


def provenance(spec: ArchSpec, raw: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Provenance]:
    """Where each leaf comes from: a key of config.json, the reference's config class, or a measurement."""
    reference = f"transformers {found['transformers']}"
    out: dict[str, Provenance] = {}
    for path, _ in spec.leaves():
        section, _, leaf = path.partition(".")
        if section == "dimensions":
            out[path] = _computed(leaf, found) or _from_config(leaf, raw, found)
        elif section in ("architecture", "model_type"):
            key = "architectures" if section == "architecture" else "model_type"
            out[path] = Provenance("config.json", key)
        elif section in ("reference_class", "config_class"):
            out[path] = Provenance(reference, "class look-up by architecture, then model_type")
        elif section in ("layer_kinds", "has_layer_types"):
            out[path] = Provenance("config.json", "layer pattern as read by " + found["config_class"])
        elif section == "tying":
            out[path] = _from_config("tie_word_embeddings", raw, found)
        elif section == "checkpoint":
            out[path] = Provenance(reference, "safetensors that save_pretrained of the tiny model writes")
        elif section == "fixed":
            out[path] = Provenance("measured", "each config field varied by itself on the tiny reference")
        elif path == "rope.parameters":
            out[path] = _from_config("rope_parameters", raw, found)
        elif section == "dropouts" or leaf == "dropout_key":
            out[path] = Provenance("measured", "in training, by what each dropout is given")
        elif leaf.endswith(".key") or leaf.endswith("bias.present"):
            out[path] = Provenance("measured", "parameters that appear when the field is flipped")
        else:
            part = found.get(section)
            difference = part.get("difference") if isinstance(part, Mapping) else None
            number = "" if difference is None else f"max difference {difference:.1e}"
            on_defaults = found["origin"] if found["origin"].startswith("defaults") else ""
            out[path] = Provenance("measured", ", ".join(part for part in (on_defaults, number) if part))
    return out


def _computed(leaf: str, found: Mapping[str, Any]) -> Provenance | None:
    """A size that the reference computes from others, by the expression that was measured."""
    places = {"num_attention_heads": ("attention", "num_heads"), "intermediate_size": ("mlp", "intermediate_size")}
    section, key = places.get(leaf, ("attention", leaf))
    expression = found[section].get(key) if leaf in _EXPRESSIONS else None
    if expression is None or expression.removeprefix("config.").isidentifier():
        return None
    return Provenance("measured", expression)


_EXPRESSIONS = frozenset(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"))


def _from_config(name: str, raw: Mapping[str, Any], found: Mapping[str, Any]) -> Provenance:
    # Of other spellings the class reads only those that it declares; it ignores the rest.
    spellings = tuple(key for key in ALIASES.get(name, (name,)) if key == name or key in found["real"]["fields"])
    if name == "rope_parameters":
        spellings = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "rotary_emb_base")
    used = [spelling for spelling in spellings if raw.get(spelling) is not None]
    if used:
        return Provenance("config.json", ", ".join(used) if name == "rope_parameters" else used[0])
    return Provenance(f"transformers {found['transformers']}", f"default of {found['config_class']}")
