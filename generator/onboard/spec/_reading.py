"""A config, with what the rules read from it: the architecture's name, the decoder's place, signs of vision, audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onboard.spec import _signs
from onboard.spec._model_types import Listed, listed_as
from onboard.spec._names import ArchName, Task, read_name
from onboard.spec._signs import Evidence, as_object, at, number

ENCODER_DECODER: Final = "encoder-decoder"
ENCODER_ONLY: Final = "encoder only"
AUDIO: Final = "audio"
DIFFUSION: Final = "diffusion"
CLASSIFIER: Final = "reward or classification head"
DRAFT: Final = "draft head"
VISION_ONLY: Final = "vision only"
NO_ARCHITECTURE: Final = "no architecture"
BASE_MODEL: Final = "base model without a language-modelling head"
TIME_SERIES: Final = "time series"
ADAPTER: Final = "adapter"
OTHER_TASK: Final = "another task"

GENERATIVE_AUTO: Final = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForVision2Seq",
    "AutoModelForMultimodalLM",
)

BY_TASK: Final[Mapping[Task, tuple[str, str]]] = {
    "draft": (DRAFT, "It is the draft head of a speculative decoder: it proposes tokens for another model to verify."),
    "classification": (CLASSIFIER, "Its head scores, labels or embeds; it does not predict the next token."),
    "encoder": (ENCODER_ONLY, "It is pretrained as an encoder (masked tokens); it does not predict the next token."),
    "encoder-decoder": (ENCODER_DECODER, "It has an encoder and a decoder with cross-attention."),
    "audio": (AUDIO, "It reads or writes audio."),
    "vision": (VISION_ONLY, "It answers about images or video without a language model."),
    "diffusion": (DIFFUSION, "It generates by denoising, not token by token."),
    "time series": (TIME_SERIES, "It forecasts or classifies series of numbers."),
    "other": (OTHER_TASK, "Its head is for a task other than language modelling."),
}
BY_GROUP: Final[Mapping[str, tuple[str, str]]] = {
    "audio": BY_TASK["audio"],
    "encoder-decoder": BY_TASK["encoder-decoder"],
    "encoder": (ENCODER_ONLY, "It is an encoder without a language-modelling head."),
    "vision": BY_TASK["vision"],
    "time series": BY_TASK["time series"],
}


@dataclass(frozen=True, slots=True)
class No:
    """Not a decoder LM or VLM."""

    is_: str
    reason: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """The config with what several rules read from it."""

    raw: Mapping[str, Any]
    name: ArchName | None
    name_key: str
    model_type: str | None
    path: tuple[str, ...]
    sees: tuple[Evidence, ...]
    hears: tuple[Evidence, ...]
    use_table: bool

    @property
    def task(self) -> Task | None:
        """What the architecture's name says that the model does."""
        return self.name.task if self.name else None

    @property
    def decoder(self) -> Mapping[str, Any]:
        """The object that holds the decoder's fields."""
        return at(self.raw, self.path)

    def named(self, says: str) -> tuple[Evidence, ...]:
        """The architecture's name as evidence."""
        return (Evidence(self.name_key, self.name.text, says),) if self.name else ()

    @property
    def has_text(self) -> bool:
        """Whether it has a vocabulary of text."""
        sizes = (part.get(key) for part in (self.raw, self.decoder) for key in ("vocab_size", "padded_vocab_size"))
        return bool(self.path) or any(number(size) for size in sizes)

    @property
    def auto_map(self) -> Mapping[str, Any]:
        """The classes that remote code registers."""
        return as_object(self.raw.get("auto_map"))

    @property
    def remote(self) -> bool:
        """Whether it comes with code of its own."""
        return bool(self.auto_map)

    @property
    def listed(self) -> Listed | None:
        """What the table of model types says; for where no property decides."""
        return listed_as(self.model_type) if self.use_table else None


def read_config(config: Mapping[str, Any], use_table: bool) -> Reading:
    """Read a config once, for all rules."""
    name, key = _architecture(config)
    model_type = config.get("model_type")
    path = _signs.text_path(config)
    sees, hears = list(_signs.vision(config)), list(_signs.audio(config))
    for depth in range(1, len(path)):
        # thinker_config.text_config: the towers lie beside the text object, not at the top.
        inner = at(config, path[:depth])
        sees += [Evidence(".".join((*path[:depth], sign.key)), sign.value, sign.says) for sign in _signs.vision(inner)]
        hears += [Evidence(".".join((*path[:depth], sign.key)), sign.value, sign.says) for sign in _signs.audio(inner)]
    known_type = model_type if isinstance(model_type, str) and model_type else None
    return Reading(config, name, key, known_type, path, tuple(sees), tuple(hears), use_table)


def _architecture(config: Mapping[str, Any]) -> tuple[ArchName | None, str]:
    """The architecture to read.

    Of several, one that generates text is preferred: the others are views of the same checkpoint.
    """
    listed = config.get("architectures")
    if isinstance(listed, str):
        return (read_name(listed), "architectures") if listed else (None, "")
    names = [
        (read_name(item), f"architectures[{place}]")
        for place, item in enumerate(listed if isinstance(listed, list) else ())
        if isinstance(item, str) and item
    ]
    for name, key in names:
        if name.task in ("causal", "conditional"):
            return name, key
    if names:
        return names[0]
    # Without architectures, remote code still names the class that it loads.
    auto_map = as_object(config.get("auto_map"))
    for auto in GENERATIVE_AUTO:
        if isinstance(target := auto_map.get(auto), str) and target:
            return read_name(target.rsplit(".", 1)[-1]), f"auto_map.{auto}"
    return None, ""
