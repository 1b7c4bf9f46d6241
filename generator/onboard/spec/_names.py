"""Architecture names, read as words: what ``Qwen2ForCausalLM`` or ``InternLM2ForRewardModel`` says that the model does.

The names follow a grammar that is far more stable than any list of them: a stem, then ``For`` and a task, or a suffix
such as ``LMHeadModel``. Only the task is read here, and only by its words, so that an architecture nobody has seen is
read as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Task = Literal[
    "causal",  # a causal language model
    "conditional",  # generates text from something: a VLM, an encoder-decoder, an audio model or (ChatGLM) a decoder
    "draft",  # proposes tokens for another model to verify
    "classification",  # scores, labels, ranks, embeds or retrieves
    "encoder",  # masked language modelling and other pretraining of encoders
    "encoder-decoder",
    "audio",
    "vision",
    "diffusion",
    "time series",
    "other",  # a task that is named, but by no word known here
    "base",  # hidden states only: LlamaModel, BertModel
    "open",  # the name says nothing of a task: Ovis, MiniCPMV
]

_WORD = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|[A-Z]|\d+")
_FOR = re.compile(r"(?<=[a-z0-9A-Z_])For(?=[A-Z0-9])")
_CAUSAL = re.compile(r"^(causallm|causallanguagemodel(?:l?ing)?|lmhead)")
_CONDITIONAL = re.compile(
    r"^(conditionalgeneration|imagetexttotext|vision2seq|multimodal(?:lm|generation|causallm)|visiontext2text|visual?chat)"
)
_LM_SUFFIX = re.compile(r"(?:WithLMHead(?:Model)?|LMHead(?:[A-Za-z0-9]*Model)?|CausalLM|LanguageModel)$")
_BASE_SUFFIX = re.compile(r"(?:Model|Encoder|Decoder|Backbone|Embeddings?|PreTrained|Reader|Transformer)$")


def _set(text: str) -> frozenset[str]:
    """A set of words, written as one string."""
    return frozenset(text.split())


_DRAFT_WORDS: Final = _set("mtp eagle medusa draft drafter speculator speculators hydra dflash assistant")
# "Col" as in ColPali and ColBERT: late interaction, which retrieves.
_SCORE_WORDS: Final = _set(
    "reward classifier classification critic score scoring ranker reranker ranking embedding embeddings embed col"
)
# Words of a stem that hold even where a language-modelling head follows: LlamaRewardForCausalLM scores, but
# HydraForCausalLM may be anything.
_STEM_BEFORE_HEAD: Final = _set("mtp eagle medusa draft drafter speculator assistant reward diffusion")

# Task words after "For", in order of priority: ImageAndTextRetrieval retrieves although it sees, ImageClassification
# sees although it classifies, NextSentencePrediction classifies although it predicts.
_TASKS: Final[tuple[tuple[Task, frozenset[str]], ...]] = (
    (
        "classification",
        _set("retrieval answering reasoning choice reward value ranking reranking similarity sentence embedding"),
    ),
    ("audio", _set("audio speech ctc xvector vector waveform spectrogram tts asr rnnt tdt voice music wav")),
    ("diffusion", _set("diffusion denoising")),
    (
        "vision",
        _set(
            "image images video object segmentation detection depth keypoint keypoints matting pose visual vision mask"
            " panoptic normal pointmap spotting table"
        ),
    ),
    ("time series", _set("prediction forecasting forecast series regression")),
    ("encoder-decoder", _set("seq2seq seq")),
    ("encoder", _set("masked mlm pretraining pre training")),
    ("classification", _set("classification classifier score scoring sequence token embeddings multiple entity")),
)


@dataclass(frozen=True, slots=True)
class ArchName:
    """An architecture's name, read.

    Attributes:
        text: the name as the config has it.
        stem: what stands before the task: ``Qwen2``.
        task: what the name says that the model does.
        said_by: the part of the name that says so: ``ForCausalLM``.
        by_stem: the task is only a word of the stem (``EagleLlamaForCausalLM``), weaker than a task of its own.
    """

    text: str
    stem: str
    task: Task
    said_by: str
    by_stem: bool = False


def words(text: str) -> tuple[str, ...]:
    """The words of a CamelCase, snake_case or kebab-case name, in lower case, numbers apart."""
    return tuple(word.lower() for word in _WORD.findall(text[:200]))


def read_name(text: str) -> ArchName:
    """Read an architecture's name as words."""
    split = _FOR.search(text)
    if split:
        stem, head = text[: split.start()], text[split.end() :]
        return _with_head(text, stem, head)
    lm = _LM_SUFFIX.search(text)
    if lm:
        stem = text[: lm.start()]
        return _from_stem(text, stem, _STEM_BEFORE_HEAD) or ArchName(text, stem, "causal", lm.group())
    by_stem = _from_stem(text, text, _DRAFT_WORDS | _SCORE_WORDS | {"diffusion"})
    if by_stem:
        return by_stem
    base = _BASE_SUFFIX.search(text)
    if base:
        return ArchName(text, text[: base.start()], "base", base.group())
    return ArchName(text, text, "open", text)


def _with_head(text: str, stem: str, head: str) -> ArchName:
    flat = head.lower()
    causal = _CAUSAL.match(flat)
    rest = head[causal.end() :] if causal else head
    # ForCausalLMMTP, ForCausalLMNextN, ForCausalLMEagle3: the draft word follows the task.
    if _DRAFT_WORDS & set(words(rest)) or re.search(r"next_?n\b", rest, re.IGNORECASE):
        return ArchName(text, stem, "draft", rest)
    if causal:
        if set(words(rest)) & (_SCORE_WORDS | {"value"}):
            return ArchName(text, stem, "classification", f"For{head}")
        return _from_stem(text, stem, _STEM_BEFORE_HEAD) or ArchName(text, stem, "causal", f"For{head}")
    if _CONDITIONAL.match(flat):
        return _from_stem(text, stem, _STEM_BEFORE_HEAD) or ArchName(text, stem, "conditional", f"For{head}")
    found = set(words(head))
    for task, marks in _TASKS:
        if found & marks:
            return ArchName(text, stem, task, f"For{head}")
    return ArchName(text, stem, "other", f"For{head}")


def _from_stem(text: str, stem: str, marks: frozenset[str]) -> ArchName | None:
    """A task that is a word of the stem: EagleLlamaForCausalLM, LlamaRewardModel, DeepSeekMTPModel."""
    for word in words(stem):
        if word in marks:
            task: Task = "draft" if word in _DRAFT_WORDS else "diffusion" if word == "diffusion" else "classification"
            return ArchName(text, stem, task, word, by_stem=True)
    if "EncoderDecoder" in stem:
        return ArchName(text, stem, "encoder-decoder", "EncoderDecoder", by_stem=True)
    return None
