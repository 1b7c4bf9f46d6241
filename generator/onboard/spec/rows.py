"""The key map: one row for each kind of tensor of the checkpoint, from what the probe saw."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from onboard.errors import Unsupported
from onboard.spec.arch import IgnoredKey, KeyRow

_PLACES = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
_ORDER = (
    *("model.embed_tokens", "model.embed_positions", "model.embed_norm", "model.layers", "model.norm"),
    *("head_dense", "head_norm", "lm_head"),
)


def key_rows(found: Mapping[str, Any]) -> tuple[KeyRow, ...]:
    """One row a kind of tensor: its pattern on disk, in the generated model, and the field that it depends on.

    Raises:
        Unsupported: a tensor that no module of the decoder explains.
    """
    # A field that takes a tensor away where it is true is no condition but another architecture, which is refused.
    optional = {
        disk_name(found, name): key
        for key, effect in found["live"].items()
        if effect["effect"] == "parameters" and isinstance(found["tiny"].get(key), bool)
        for name in effect["removed" if found["tiny"][key] else "added"]
        if only_a_bias(name, effect)
    }
    rows: dict[str, KeyRow] = {}
    for name in (*found["disk"], *(name for name in optional if name not in found["disk"])):
        pattern = re.sub(r"\.\d+\.", ".{layer}.", name, count=1)
        if pattern in rows:
            continue
        if name not in found["disk"] and not _explained(name, found):
            continue  # of a setting that is not served: the field that brings it is refused
        shape = found["disk"].get(name) or found["disk"].get(re.sub(r"bias$", "weight", name), [])[:1]
        row = _row(pattern, _shape(shape, found), optional.get(name, ""), found)
        rows[pattern] = replace(row, layers=_layers(row.native[0], found))
        if _of_mixer(row.native[0], found):
            # The letters are those of attention and MLP.
            rows[pattern] = replace(rows[pattern], shape=f"as in {found['mixer']['class']}")

    def place(row: KeyRow) -> int:
        return next(index for index, prefix in enumerate(_ORDER) if row.native[0].startswith(prefix))

    return tuple(sorted(rows.values(), key=place))


def _layers(native: str, found: Mapping[str, Any]) -> str:
    """Expression of the layers that have a tensor, where a mixer takes the attention's place in others."""
    mixer = found.get("mixer")
    partial = found["block"].get("pre_attention_layers")
    if partial and native.split(".")[3:4] == [found["block"]["pre_attention_norm"]]:
        return str(partial)
    if native == "model.layers.{layer}.self_attn.o_proj.bias" and found["attention"].get("o_bias_layers"):
        return str(found["attention"]["o_bias_layers"])
    if mixer is None or not native.startswith("model.layers."):
        return ""
    part = native.split(".")[3]
    blocks = (found["block"], mixer["block"])
    with_attention, with_mixer = (part in {one[place] for place in _PLACES} for one in blocks)
    if part == "self_attn" or with_attention > with_mixer:
        return str(mixer["layers"]).replace("==", "!=")
    if _of_mixer(native, found) or with_mixer > with_attention:
        return str(mixer["layers"])
    return ""


def _of_mixer(native: str, found: Mapping[str, Any]) -> bool:
    mixer = found.get("mixer")
    return mixer is not None and native.startswith(f"model.layers.{{layer}}.{mixer['name']}.")


def only_a_bias(parameter: str, effect: Mapping[str, Any]) -> bool:
    """Whether a field brings the bias of a module that is there anyway."""
    module, _, leaf = parameter.rpartition(".")
    return leaf == "bias" and f"{module}.weight" not in (*effect["added"], *effect["removed"])


def _explained(parameter: str, found: Mapping[str, Any]) -> bool:
    """Whether a parameter belongs to a module that was explained."""
    pattern = re.sub(r"\.\d+\.", ".{layer}.", parameter, count=1)
    return any(entry["reference"] in (pattern, pattern.rpartition(".")[0]) for entry in found["modules"])


def disk_name(found: Mapping[str, Any], parameter: str) -> str:
    """Name on disk of a parameter of the reference; they are the same but where the reference converts them."""
    renamed: str = found.get("disk_of", {}).get(parameter, parameter)
    return renamed


def reference_parameter(found: Mapping[str, Any], native: str) -> str | None:
    """The reference's parameter that a native one comes from, in the first layer that has it; None where none does.

    Args:
        found: the measurement.
        native: pattern of the native parameter's name.
    """
    path, _, leaf = native.rpartition(".")
    layer = _first_layer(native, found)
    for entry in found["modules"]:
        if native in entry["native"]:
            return str(entry["reference"]).replace("{layer}", layer)
        if path in entry["native"]:
            return f"{entry['reference']}.{leaf}".replace("{layer}", layer)
    return None


def _first_layer(native: str, found: Mapping[str, Any]) -> str:
    """Index of the first layer that has a native parameter."""
    return str(found["roles"].get("attention_layers", [0])[0]) if ".self_attn." in native else "0"


def _row(pattern: str, shape: str, only_if: str, found: Mapping[str, Any]) -> KeyRow:
    path, _, leaf = pattern.rpartition(".")
    for entry in found["modules"]:
        if pattern == disk_name(found, entry["reference"]):
            return KeyRow(pattern, tuple(entry["native"]), "rename", shape, only_if=only_if)
        if path != _module_on_disk(found, entry["reference"], leaf):
            continue
        native = tuple(f"{name}.{leaf}" for name in entry["native"])
        transposed = entry["transposed"] and leaf == "weight"
        operation: Literal["rename", "transpose", "split", "transpose, split"]
        if len(native) > 1:
            operation = "transpose, split" if transposed else "split"
        else:
            operation = "transpose" if transposed else "rename"
        return KeyRow(pattern, native, operation, shape, entry["groups"], only_if)
    raise Unsupported(
        "The checkpoint has a tensor outside of the decoder.",
        f"{pattern} belongs to no part of {found['reference_class']} that was explained.",
        "Report the architecture.",
        code="unsupported.layout",
    )


def _module_on_disk(found: Mapping[str, Any], reference: str, leaf: str) -> str:
    """Path on disk of a module, of which one parameter is looked for."""
    name = disk_name(found, f"{reference.replace('{layer}', '0')}.{leaf}")
    path = name.rpartition(".")[0]
    return re.sub(r"\.\d+\.", ".{layer}.", path + ".", count=1)[:-1] if "{layer}" in reference else path


def ignored_keys(found: Mapping[str, Any]) -> tuple[IgnoredKey, ...]:
    """Old checkpoints store tables and masks that today's models compute from the config."""
    attention = f"{found['roles']['layers']}.{{layer}}.{found['roles']['attention']}"
    out = []
    if found["rope"]:
        out.append(IgnoredKey(f"{attention}.rotary_emb.inv_freq", "computed from the config; old files store it"))
    patterns = [re.compile(pattern) for pattern in found.get("ignored_patterns", ())]
    for leaf in ("bias", "masked_bias"):
        name = f"{attention}.{leaf}"
        if any(pattern.search(name.replace("{layer}", "0")) for pattern in patterns):
            out.append(IgnoredKey(name, "the causal mask; old files store it"))
    return tuple(out)


def _shape(shape: list[int], found: Mapping[str, Any]) -> str:
    """The tiny shape in the letters of the generated code, which its sizes give, since they mostly differ."""
    words = found["letters"]
    return "[" + ", ".join(words.get(str(size), str(size)) for size in shape) + "]"


def base_prefix(found: Mapping[str, Any]) -> str | None:
    """Prefix of the base model's tensors that files of the base model alone lack, as transformers loads them too.

    Classes that call the base model ``model`` are published with their heads; the older names (``transformer``) come
    from times when the base model was.
    """
    prefix = f"{found.get('base_model_prefix') or 'model'}."
    named = any(name.startswith(prefix) for name in found["disk"])
    return prefix if named and prefix != "model." else None
