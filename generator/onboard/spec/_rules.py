"""The rules that say that a config is not a decoder LM or VLM, and what it is instead."""

from __future__ import annotations

from typing import Final

from onboard.spec import _signs
from onboard.spec._names import words
from onboard.spec._reading import ADAPTER, AUDIO, BY_TASK, DIFFUSION, ENCODER_ONLY, VISION_ONLY, No, Reading
from onboard.spec._signs import Evidence, as_object, evidence, number

_DRAFT_KEYS: Final = (
    "draft_vocab_size",
    "num_target_layers",
    "target_layer_ids",
    "target_hidden_size",
    "eagle_config",
    "dflash_config",
    "medusa_num_heads",
    "medusa_num_layers",
    "speculators_config",
    "speculators_model_type",
    "mtp_layer_idx",
)
_ENCODER_LAYERS: Final = ("encoder_layers", "num_encoder_layers", "encoder_num_layers", "encoder_num_hidden_layers")
_DECODER_LAYERS: Final = ("decoder_layers", "num_decoder_layers", "decoder_num_layers", "decoder_num_hidden_layers")
# Names differ (is_causal, causal, causal_mask); a decoder that writes true is none the wiser, false is a statement.
_CAUSAL_FLAGS: Final = ("is_causal", "causal", "causal_mask", "causal_attention")
_BIDIRECTIONAL_FLAGS: Final = (
    "use_bidirectional_attention",
    "bidirectional",
    "is_bidirectional",
    "bidirectional_attention",
)


def _not_a_model(read: Reading) -> No | None:
    for key in ("_diffusers_version", "_class_name"):
        if read.raw.get(key) is not None and not read.name:
            return No(
                DIFFUSION,
                "It is a part of a diffusers pipeline, not a language model.",
                (evidence((), key, read.raw[key], "is written by diffusers"),),
            )
    if read.raw.get("peft_type") is not None and not read.name:
        return No(
            ADAPTER,
            "It is an adapter for another model; onboard its base model instead.",
            (evidence((), "peft_type", read.raw["peft_type"], "is the config of an adapter"),),
        )
    return None


def _stated_task(read: Reading) -> No | None:
    """The architecture's name states a task that is not generating text."""
    name = read.name
    if name is None or name.task in ("causal", "conditional", "base", "open"):
        return None
    # "Eagle" in a stem is a family of VLMs as well as one of draft heads: what the config describes decides.
    if name.task == "draft" and name.by_stem and read.sees:
        return None
    is_, reason = BY_TASK[name.task]
    said = f"names the task: {name.said_by} ({is_})"
    if name.task in ("encoder", "other", "classification", "time series"):
        if read.hears and not read.sees:
            return No(AUDIO, BY_TASK["audio"][1], (*read.named(said), *read.hears[:2]))
        if name.task in ("encoder", "other") and read.sees and not read.has_text:
            return No(VISION_ONLY, BY_TASK["vision"][1], (*read.named(said), *read.sees[:2]))
    return No(is_, reason, read.named(said))


def _draft(read: Reading) -> No | None:
    for key in _DRAFT_KEYS:
        if read.raw.get(key) is not None:
            why = evidence((), key, read.raw[key], "is a key of a draft head, which proposes tokens for a target model")
            return No(*BY_TASK["draft"], (why,))
    return None


def _encoder_decoder(read: Reading) -> No | None:
    for path, part in (((), read.raw), (read.path, read.decoder)):
        if part.get("is_encoder_decoder") is True:
            why = evidence(path, "is_encoder_decoder", True, "says that an encoder feeds a decoder")
            return No(*_encoder_decoder_or_audio(read, why))
        if read.task == "causal":
            continue  # a decoder taken from an encoder-decoder family keeps its encoder keys
        enc = next((key for key in _ENCODER_LAYERS if number(part.get(key))), None)
        dec = next((key for key in _DECODER_LAYERS if number(part.get(key))), None)
        if dec and (enc or dec == "num_decoder_layers"):
            pair = tuple(evidence(path, key, part[key], "counts layers of its own") for key in (enc, dec) if key)
            return No(*_encoder_decoder_or_audio(read, *pair))
    pair = tuple(
        evidence((), key, read.raw[key], "is a model of its own")
        for key in ("encoder", "decoder")
        if as_object(read.raw.get(key))
    )
    if len(pair) == 2:
        return No(*_encoder_decoder_or_audio(read, *pair))
    return None


def _encoder_decoder_or_audio(read: Reading, *why: Evidence) -> tuple[str, str, tuple[Evidence, ...]]:
    if read.hears and not read.sees:
        return AUDIO, "It reads or writes audio, by an encoder and a decoder.", (*why, *read.hears[:2])
    return *BY_TASK["encoder-decoder"], why


def _audio(read: Reading) -> No | None:
    """Audio without vision. With vision as well (an omni model) the text side is a VLM's."""
    if read.sees:
        return None
    signs = read.hears
    if not signs and read.task != "causal":
        signs = _signs.audio_tokens(read.raw)
    if signs and not (read.task == "conditional" and _signs.image_tokens(read.raw)):
        return No(*BY_TASK["audio"], signs[:3])
    return None


def _diffusion(read: Reading) -> No | None:
    for key, value in read.raw.items():
        if "diffusion" in words(str(key)) and value not in (None, False):
            return No(*BY_TASK["diffusion"], (evidence((), str(key), value, "is about denoising"),))
    listed = read.listed
    if listed and listed.group == "diffusion":
        return No(*BY_TASK["diffusion"], (listed.evidence,))
    mask = number(read.raw.get("mask_token_id"))
    specials = [read.raw.get(key) for key in ("pad_token_id", "eos_token_id", "bos_token_id")]
    if mask is None or mask in specials or read.raw.get("gmask_token_id") is not None or not read.remote:
        return None
    # A decoder trained on next tokens has no use for a mask token; one that fills in masked tokens does.
    block = number(read.raw.get("block_size"))
    if block or (read.task in ("open", "base") and "AutoModelForMaskedLM" not in read.auto_map):
        return No(*BY_TASK["diffusion"], (evidence((), "mask_token_id", mask, "is a mask token, which it fills in"),))
    return None


def _bidirectional(read: Reading) -> No | None:
    if read.sees:
        return None
    places = [((), read.raw), (read.path, read.decoder)]
    for path, part in places:
        for key in _CAUSAL_FLAGS:
            if part.get(key) is False:
                why = evidence(path, key, False, "says that attention is not causal")
                return No(ENCODER_ONLY, "Its attention sees the tokens after each token: it is an encoder.", (why,))
        for key in _BIDIRECTIONAL_FLAGS:
            if part.get(key) in (True, "all"):
                why = evidence(path, key, part[key], "says that attention looks both ways")
                return No(ENCODER_ONLY, "Its attention sees the tokens after each token: it is an encoder.", (why,))
    return None


RULES: Final = (_not_a_model, _stated_task, _draft, _encoder_decoder, _audio, _diffusion, _bidirectional)
