"""Whether anything states a language-modelling head: the name, auto_map, or a model nested beside a vision part."""

from __future__ import annotations

from onboard.spec import _signs
from onboard.spec._names import read_name
from onboard.spec._reading import (
    BASE_MODEL,
    BY_GROUP,
    BY_TASK,
    ENCODER_ONLY,
    GENERATIVE_AUTO,
    NO_ARCHITECTURE,
    No,
    Reading,
)
from onboard.spec._signs import Evidence, evidence, number


def find_head(read: Reading) -> tuple[Evidence, ...] | No:
    """The evidence of a language-modelling head, or that there is none."""
    if read.task == "causal":
        return read.named("names a causal language model")
    if read.task == "conditional":
        return _conditional(read)
    for auto in GENERATIVE_AUTO:
        if isinstance(target := read.auto_map.get(auto), str) and target:
            return (evidence(("auto_map",), auto, target, "loads it as a language model"),)
    for auto in ("AutoModel", "AutoModelForSeq2SeqLM"):
        target = read.auto_map.get(auto)
        if isinstance(target, str) and read_name(target.rsplit(".", 1)[-1]).task in ("causal", "conditional"):
            return (evidence(("auto_map",), auto, target, "is a class that generates text"),)
    if (
        read.task in ("base", "open")
        and read.name
        and read.name.said_by == "Decoder"
        and read.raw.get("is_decoder") is True
    ):
        return (*read.named("names a decoder"), evidence((), "is_decoder", True, "makes it a causal language model"))
    if read.sees and (nested := _nested_head(read)) and not _base_of_transformers(read):
        return (*read.named("wraps a language model"), *nested)
    if read.task == "draft" or (read.task == "open" and read.sees and read.has_text and not _contrastive(read)):
        return read.named("is a model class that is not a bare base model")
    return _headless(read)


def _base_of_transformers(read: Reading) -> bool:
    """Whether a name such as Idefics2Model is transformers' base class, whose head is another class."""
    listed = read.listed
    return bool(listed and listed.group == "image-text" and read.task == "base" and not read.remote)


def _conditional(read: Reading) -> tuple[Evidence, ...] | No:
    said = read.named("generates text from its input")
    if not read.sees and not _signs.image_tokens(read.raw):
        listed = read.listed
        if listed and listed.group in ("encoder-decoder", "audio"):
            return No(*BY_GROUP[listed.group], (*said, listed.evidence))
    return said


def _nested_head(read: Reading) -> tuple[Evidence, ...]:
    listed = read.decoder.get("architectures") if read.path else None
    for place, item in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(item, str) and read_name(item).task == "causal":
            return (Evidence(".".join((*read.path, f"architectures[{place}]")), item, "names a causal language model"),)
    return ()


def _headless(read: Reading) -> No:
    """No head is stated. Say what it is as far as properties, then the table, tell."""
    if read.sees and not read.has_text:
        return No(*BY_TASK["vision"], (*read.named("names no language-modelling head"), *read.sees[:2]))
    listed = read.listed
    if read.name is None:
        why = (evidence((), "architectures", read.raw.get("architectures"), "names no class"),)
        reason = "Its config.json names no architecture, so nothing says which class its checkpoint belongs to."
        return No(NO_ARCHITECTURE, reason, why)
    no_head = read.named("names no language-modelling head")
    if read.sees:
        reason = "It encodes images and text; no language-modelling head is stated."
        return No(ENCODER_ONLY if _contrastive(read) else BASE_MODEL, reason, (*no_head, *read.sees[:2]))
    if listed and listed.group in BY_GROUP:
        return No(*BY_GROUP[listed.group], (*no_head, listed.evidence))
    if number(read.raw.get("type_vocab_size")) is not None:
        token_types = evidence((), "type_vocab_size", read.raw["type_vocab_size"], "embeds token types, as encoders do")
        return No(ENCODER_ONLY, BY_GROUP["encoder"][1], (*no_head, token_types))
    return No(BASE_MODEL, "It ends in hidden states: the checkpoint has no language-modelling head.", no_head)


def _contrastive(read: Reading) -> bool:
    return any(number(read.raw.get(key)) is not None for key in ("logit_scale_init_value", "projection_dim"))
