"""Signs that a config carries: of seeing, of hearing, of experts, of where the decoder's fields are.

Each sign is found by the words of a key and the shape of its value, never by the name of an architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from onboard.spec._names import words
from onboard.spec.keys import ALIASES

TEXT_KEYS: Final = (
    "text_config",
    "llm_config",
    "language_config",
    "text_cfg",
    "llm_cfg",
    "language_model_config",
    "lm_config",
    "language_model",
    "llm",
    "text_model_config",
    "llm_backbone_config",
    "decoder_config",
)
# Omni models: the part that reads and writes text, beside one that speaks.
_WRAPPER_KEYS: Final = ("thinker_config", "model_config", "base_config")
# Objects whose keys name modules or labels of the model, not what the model has.
_NOT_PARTS: Final = frozenset(
    {
        "auto_map",
        "quantization_config",
        "compression_config",
        "id2label",
        "label2id",
        "task_specific_params",
        "torch_dtype",
    }
)

_SEES: Final = frozenset(("vision", "visual", "vit", "image", "img", "video", "vpm", "siglip", "pixel", "picture"))
_SEES_VALUE: Final = frozenset(("tower", "encoder", "backbone", "model", "processor", "tokenizer"))
_HEARS: Final = frozenset(
    ("audio", "speech", "speaker", "whisper", "wav2vec", "mel", "mels", "codec", "encodec", "codebooks", "acoustic")
).union(("vocoder", "waveform"))
_HEARS_KEYS: Final = (
    "feat_extract_norm",
    "feat_extract_activation",
    "num_feat_extract_layers",
    "sampling_rate",
    "conv_pos_width",
)
# Quantisers have codebooks too.
_QUANTIZES: Final = frozenset(["quip", "quant", "quantization", "aqlm", "vptq", "params"])
_TOKEN_WORDS: Final = frozenset(["token", "id", "index", "ids", "start", "end", "placeholder"])
_IMAGE_SIZES: Final = ("image_size", "img_size", "image_dim", "max_image_size", "image_resolution", "image_area")

_MOE_SWITCHES: Final = (
    "is_moe",
    "use_moe",
    "enable_moe",
    "enable_moe_block",
    "moe_enable",
    "moe_enabled",
    "with_moe",
    "has_moe",
    "moe",
)
_MOE_HINTS: Final = ("num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One key that decided.

    Attributes:
        key: dotted path of the key: ``text_config.num_experts``.
        value: its JSON value, shortened where long.
        says: what follows from it.
    """

    key: str
    value: Any
    says: str


def short(value: Any, depth: int = 2) -> Any:
    """A JSON value, shortened for people: long strings cut, long lists and objects summed up."""
    if isinstance(value, str) and len(value) > 80:
        return value[:77] + "..."
    if isinstance(value, Mapping):
        keys = [str(key)[:40] for key in list(value)[:4]]
        return "{" + ", ".join(keys) + (", ..." if len(value) > 4 else "") + "}"
    if isinstance(value, list | tuple):
        return (
            [short(item, depth - 1) for item in value[:4]] + (["..."] if len(value) > 4 else []) if depth else "[...]"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def evidence(path: tuple[str, ...], key: str, value: Any, says: str) -> Evidence:
    """Evidence from a key inside the object at ``path``."""
    return Evidence(".".join((*path, key)), short(value), says)


def as_object(value: Any) -> Mapping[str, Any]:
    """The value where it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """The value where it is a number of a size that configs have, and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -1e18 < value < 1e18 else None


def text_path(config: Mapping[str, Any], depth: int = 0) -> tuple[str, ...]:
    """Where the decoder's fields are: the path of the nested object, or () for the top level."""
    if depth > 3:
        return ()
    for key in TEXT_KEYS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner and not (key == "decoder_config" and _other_stacks(config)):
            return (key, *text_path(inner, depth + 1))
    for key in _WRAPPER_KEYS:
        inner = config.get(key)
        if isinstance(inner, Mapping) and (below := text_path(inner, depth + 1)):
            return (key, *below)
    return ()


def _other_stacks(config: Mapping[str, Any]) -> bool:
    """Whether text runs through other stacks of layers beside a decoder, which then is not the whole model."""
    return any(
        isinstance(part, Mapping)
        and key not in TEXT_KEYS
        and number(part.get("num_hidden_layers")) is not None
        and not set(words(str(key))) & (_SEES | _HEARS)
        and not vision({key: part})
        and not audio({key: part})
        for key, part in config.items()
    )


def at(config: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """The object at a path that :func:`text_path` gave."""
    for key in path:
        config = as_object(config.get(key))
    return config


def _objects(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The top level and the objects one or two levels below it that are parts of the model but not its decoder."""
    yield (), config
    for key, inner in config.items():
        if not isinstance(inner, Mapping) or key in _NOT_PARTS or key in TEXT_KEYS:
            continue
        if not set(words(str(key))) & (_SEES | _HEARS):
            yield (str(key),), inner


def vision(config: Mapping[str, Any]) -> tuple[Evidence, ...]:
    """Signs of a vision tower or of image input that the language model reads."""
    found = [
        sign for path, part in _objects(config) for key, value in part.items() if (sign := _sees(path, str(key), value))
    ]
    for key in _IMAGE_SIZES:
        if number(config.get(key)) or (isinstance(config.get(key), list) and config[key]):
            found.append(evidence((), key, config[key], "gives the size of input images"))
    return tuple(found)


def _sees(path: tuple[str, ...], key: str, value: Any) -> Evidence | None:
    said = set(words(key))
    mine = said & _SEES or ({"mm"} & said and said & {"projector", "vision", "tower"})
    if isinstance(value, Mapping) and value:
        if mine and key not in _NOT_PARTS:
            return evidence(path, key, value, "describes a part that sees images")
        if _looks_like_images(value) and not path:
            return evidence(
                path, key, value, "describes a part that reads pixels (their channels, image_size or patch_size)"
            )
    if isinstance(value, str) and value and mine and said & (_SEES_VALUE | {"projector"}):
        return evidence(path, key, value, "names a vision tower or its projector")
    if isinstance(value, list) and value and "tower" in said and mine:
        return evidence(path, key, value, "names vision towers")
    return None


def _looks_like_images(part: Mapping[str, Any]) -> bool:
    # Three channels in: red, green and blue. Nothing but pixels has them.
    if number(part.get("in_channels")) == 3 or number(part.get("num_channels")) == 3:
        return True
    return any(number(part.get(key)) for key in _IMAGE_SIZES) and bool(number(part.get("patch_size")))


def image_tokens(config: Mapping[str, Any]) -> tuple[Evidence, ...]:
    """Token ids for images or video. Weaker than a tower: a text model cut out of a VLM may keep them."""
    return tuple(
        evidence((), str(key), value, "is a token that stands for an image")
        for key, value in config.items()
        if number(value) is not None
        and (said := set(words(str(key)))) & (_SEES | {"boi", "eoi", "media"})
        and said & _TOKEN_WORDS
    )


def audio(config: Mapping[str, Any]) -> tuple[Evidence, ...]:
    """Signs of audio input or output."""
    found = []
    for path, part in _objects(config):
        if set(words(".".join(path))) & _QUANTIZES:
            continue
        for key, value in part.items():
            said = set(words(str(key)))
            if value in (None, False, "", 0) or str(key) in _NOT_PARTS:
                continue
            if isinstance(value, Mapping) and not value:
                continue
            is_token = said & _TOKEN_WORDS and not isinstance(value, str | Mapping)
            if (said & _HEARS and not is_token) or key in _HEARS_KEYS:
                found.append(evidence(path, str(key), value, "describes audio"))
    return tuple(found)


def audio_tokens(config: Mapping[str, Any]) -> tuple[Evidence, ...]:
    """Token ids for audio: weaker than a part that hears."""
    return tuple(
        evidence((), str(key), value, "is a token that stands for audio")
        for key, value in config.items()
        if number(value) is not None and (said := set(words(str(key)))) & _HEARS and said & _TOKEN_WORDS
    )


def _count(value: Any) -> float | None:
    """Experts that a value counts; a list (one count a layer, or one a modality) counts its largest."""
    if isinstance(value, list | tuple):
        counts = [one for item in value if (one := number(item)) is not None]
        return max(counts) if counts else None
    return number(value)


def experts(config: Mapping[str, Any], path: tuple[str, ...]) -> tuple[bool, tuple[Evidence, ...]]:
    """Whether the decoder is a mixture of experts, and the keys that say so (or that say that its experts are off)."""
    decoder = at(config, path)
    off = _switched_off(decoder, path)
    if off:
        return False, off
    places = [(path, decoder)] + [
        ((*path, str(key)), inner)
        for key, inner in decoder.items()
        if isinstance(inner, Mapping) and set(words(str(key))) & {"ffn", "moe", "mlp", "expert", "experts"}
    ]
    counted = [
        (evidence(where, key, part[key], ""), count)
        for where, part in places
        for key in ALIASES["num_experts"]
        if (count := _count(part.get(key))) is not None
    ]
    if counted:
        sign, count = max(counted, key=lambda pair: pair[1])
        if count > 1:
            return True, (Evidence(sign.key, sign.value, f"counts {int(count)} experts: a mixture of experts"),)
        return False, (Evidence(sign.key, sign.value, f"counts {int(count)} experts: every layer is dense"),)
    return _hinted(decoder, path)


def _hinted(decoder: Mapping[str, Any], path: tuple[str, ...]) -> tuple[bool, tuple[Evidence, ...]]:
    """No key counts the experts (the class has a default), but others are about choosing among them."""
    null = next((key for key in ALIASES["num_experts"] if key in decoder and decoder[key] is None), None)
    if null:
        return False, (evidence(path, null, None, "counts no experts: every layer is dense"),)
    for name in _MOE_HINTS:
        for key in ALIASES[name]:
            if (_count(decoder.get(key)) or 0) >= 1:
                return True, (
                    evidence(path, key, decoder[key], "is about routing among experts: a mixture of experts"),
                )
    return False, ()


def _switched_off(decoder: Mapping[str, Any], path: tuple[str, ...]) -> tuple[Evidence, ...]:
    for key in _MOE_SWITCHES:
        if decoder.get(key) is False:
            return (evidence(path, key, False, "switches the experts off: every layer is dense"),)
    layers = next((n for key in ALIASES["num_hidden_layers"] if (n := number(decoder.get(key))) is not None), None)
    first = number(decoder.get("first_k_dense_replace"))
    if layers is not None and first is not None and first >= layers > 0:
        return (evidence(path, "first_k_dense_replace", first, f"makes all {int(layers)} layers dense"),)
    frequency = decoder.get("moe_layer_freq")
    if isinstance(frequency, list) and frequency and not any(frequency):
        return (evidence(path, "moe_layer_freq", frequency, "gives no layer experts"),)
    kinds = decoder.get("mlp_layer_types")
    if isinstance(kinds, list) and kinds and all(kind == "dense" for kind in kinds):
        return (evidence(path, "mlp_layer_types", kinds, "makes every layer dense"),)
    blocks = decoder.get("layers_block_type")
    if isinstance(blocks, list) and "mlp" in blocks and "moe" not in blocks:
        return (evidence(path, "layers_block_type", blocks, "has MLP blocks and no block of experts"),)
    pattern = decoder.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "-" in pattern and "E" not in pattern:
        return (evidence(path, "hybrid_override_pattern", pattern, "has MLP blocks (-) and no block of experts (E)"),)
    only = decoder.get("mlp_only_layers")
    if (
        isinstance(only, list)
        and layers is not None
        and 0 < layers <= 10_000
        and set(map(str, range(int(layers)))) <= set(map(str, only))
    ):
        return (evidence(path, "mlp_only_layers", only, "names every layer as dense"),)
    return ()
