"""What a config.json describes: a dense decoder, a mixture of experts, a vision-language model, or something else.

Decided by properties, in this order; the first that holds decides, and its keys are the evidence:

1. it is a part of a diffusers pipeline, or an adapter;
2. the task that the architecture's name states, by its words (``ForSequenceClassification``, ``ForCTC``,
   ``ForCausalLMNextN``);
3. keys of a draft head, of an encoder-decoder, of audio without vision, of denoising, of bidirectional attention;
4. whether anything states a language-modelling head: the name, ``auto_map``, a language model nested beside a vision
   part; where nothing does, it is a base model or an encoder;
5. signs of vision: a VLM; counted experts: a mixture of experts; else dense.

A table of model types made from transformers is asked only where no property decides, and then it is among the
evidence. Without any architecture the answer is "no architecture", unless ``auto_map`` states a language model: a
config that names no class leaves open whether the checkpoint has a head at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from onboard.spec import _signs
from onboard.spec._head import find_head
from onboard.spec._names import words
from onboard.spec._reading import No, Reading, read_config
from onboard.spec._rules import RULES
from onboard.spec._signs import Evidence

__all__ = ["Evidence", "Kind", "classify"]

Label = Literal["dense", "moe", "vlm", "unsupported"]

_IMAGE_WORDS: Final = frozenset(
    ("vl", "vlm", "vision", "visual", "llava", "ocr", "image", "video", "multimodal", "multimodality", "omni")
)


@dataclass(frozen=True, slots=True)
class Kind:
    """The class of a config.json.

    Attributes:
        kind: ``"dense"``, ``"moe"`` or ``"vlm"``; ``"unsupported"`` for all else.
        architecture: the entry of ``architectures`` that was read.
        model_type: as in the config.
        text_config: path of the object that holds the decoder's fields; ``()`` is the top level.
        evidence: the keys and values that decided.
        is_: for unsupported, what the model is instead.
        reason: for unsupported, one sentence for people.
    """

    kind: Label
    architecture: str | None
    model_type: str | None
    text_config: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    is_: str | None = None
    reason: str | None = None


def classify(config: Mapping[str, Any], *, use_table: bool = True) -> Kind:
    """Say what a config.json describes, and by which of its keys.

    Never raises for any JSON object: values of unexpected types are read as absent.

    Args:
        config: the parsed config.json.
        use_table: ask the table of model types where no property decides; False shows what the properties alone say.

    Returns:
        The kind with its evidence; for ``"unsupported"`` also what the model is and the reason.
    """
    read = read_config(config, use_table)
    no = next((no for rule in RULES if (no := rule(read))), None)
    if no:
        return _kind(read, "unsupported", no.evidence, no.is_, no.reason)
    head = find_head(read)
    if isinstance(head, No):
        return _kind(read, "unsupported", head.evidence, head.is_, head.reason)
    seen = _vision(read)
    if seen:
        return _kind(read, "vlm", (*head, *seen))
    is_moe, counted = _signs.experts(read.raw, read.path)
    if not is_moe and not counted and (called := _called_moe(read)):
        is_moe, counted = True, called
    return _kind(read, "moe" if is_moe else "dense", (*head, *counted))


def _kind(
    read: Reading, kind: Label, why: tuple[Evidence, ...], is_: str | None = None, reason: str | None = None
) -> Kind:
    name = read.name.text if read.name and read.name_key.startswith("architectures") else None
    return Kind(kind, name, read.model_type, read.path, why, is_, reason)


def _vision(read: Reading) -> tuple[Evidence, ...]:
    """The signs that make a generating model a VLM; empty for a text model."""
    if read.sees:
        return read.sees
    tokens = _signs.image_tokens(read.raw)
    if tokens and (read.task != "causal" or _called_vlm(read)):
        return tokens
    listed = read.listed
    if listed and listed.group == "image-text" and (read.task == "conditional" or listed.from_hub):
        return (listed.evidence,)
    if read.task == "conditional" and _called_vlm(read):
        return read.named("is named as a model that sees")
    return ()


def _called_vlm(read: Reading) -> bool:
    called = (*words(read.name.stem if read.name else ""), *words(read.model_type or ""))
    return bool(set(called) & _IMAGE_WORDS)


def _called_moe(read: Reading) -> tuple[Evidence, ...]:
    """A name that says MoE, where no key counts the experts (the class has a default)."""
    if read.name and "moe" in words(read.name.stem.replace("MoE", "Moe")):
        return read.named("is named as a mixture of experts, and no key says otherwise")
    return ()
