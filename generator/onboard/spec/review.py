"""Config keys that need a reviewer's eye, and those that are known not to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from onboard.facts._text import shown
from onboard.spec.arch import ReviewItem

# Bookkeeping, generation defaults, dropout of other heads, training hints: none of them changes the forward pass.
HARMLESS: Final = frozenset(
    (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "architectures",
        "auto_map",
        "cache_implementation",
        "decoder_start_token_id",
        "do_sample",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_length",
        "model_max_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "quantization_config",
        "return_dict",
        "rope_scaling",
        "rope_theta",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    )
)


def unknown_keys(raw: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Keys of config.json that the reference's config class does not know and that are not known to be harmless.

    A null value says nothing and is left out.

    Args:
        raw: the parsed config.json.
        known: fields of the reference's config class.

    Returns:
        The keys, sorted.
    """
    return sorted(key for key in set(raw) - set(known) - HARMLESS if raw[key] is not None)


def not_built(found: Mapping[str, Any]) -> list[ReviewItem]:
    """What to say of a config.json from which transformers cannot build the real model.

    Args:
        found: what the probe measured; ``real`` has the error.
    """
    real, tiny = found["real"], found["tiny"]
    if not real.get("error"):
        return []
    counts = {name: value for name, value in tiny.items() if {"first", "dense"} <= set(name.split("_"))}
    dense = [
        f"{name}={was}" for name, value in counts.items() if (was := real["values"].get(name)) not in (None, value)
    ]
    rope = [name for name in tiny.get("rope_parameters") or {} if name not in (real.get("rope_parameters") or {})]
    filled = f" (rope_parameters.{', '.join(rope)})" if rope else ""
    how = (
        f"all layers are dense, in spite of {', '.join(dense)}"
        if dense
        else f"the missing values{filled} are filled in"
    )
    return [
        ReviewItem(
            f"transformers cannot build {found['reference_class']} from this config.json: {shown(real['error'])}.",
            f"The proof holds for the tiny config, in which {how}; complete the file.",
        )
    ]
