"""Which of transformers' causal-LM architectures are decoder-only and dense, each with its default config.json.

Computed from what transformers says about a model type (the auto classes' mappings, the config class and what it
writes) and from onboard's own :func:`~onboard.spec.kind.classify`; no model type is listed here.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.spec.kind import classify

# A model type with one of these heads as well fills in masked tokens or translates: its causal LM is its encoder, or a
# half of its encoder-decoder, under a causal mask.
_OTHER_TASKS = {
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "derived from an encoder-decoder: it has a head for translation",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "derived from an encoder-decoder: it has a head for transcription",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "derived from an encoder: it has a masked-LM head as well",
}
_DECODER_LAYERS = re.compile(r"(num_)?decoder_(num_)?(hidden_)?layers")


@dataclass(frozen=True)
class Subject:
    """One config.json to onboard.

    Attributes:
        name: the model type, or the file's name; unique within a sweep, and safe as a file's name.
        architecture: the entry of ``architectures``, as far as it is known.
        kind: what onboard says it is: ``dense``, ``moe``, ``vlm``, ``unsupported``.
        config: the text of config.json.
    """

    name: str
    architecture: str
    kind: str
    config: str


@dataclass(frozen=True)
class Scope:
    """The causal-LM mapping, divided.

    Attributes:
        subjects: decoder-only and dense, by model type.
        left_out: model type to the reason.
        aliases: model type to the one whose config class, and so whose config.json, it has.
    """

    subjects: tuple[Subject, ...]
    left_out: Mapping[str, str]
    aliases: Mapping[str, str]


def find_scope() -> Scope:
    """Divide transformers' causal-LM mapping (imports transformers, not torch's models)."""
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()  # some defaults of its own are none that it likes
    subjects: list[Subject] = []
    left_out: dict[str, str] = {}
    aliases: dict[str, str] = {}
    other_tasks = {reason: getattr(modeling_auto, name) for name, reason in _OTHER_TASKS.items()}
    for model_type, architecture in sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        also = next((reason for reason, mapping in other_tasks.items() if model_type in mapping), None)
        try:
            raw = default_config(transformers.CONFIG_MAPPING[model_type], architecture)
        except Exception as error:  # whatever a config class raises, it is that one's fault alone
            left_out[model_type] = also or f"its config has no default: {_first_line(error)}"
            continue
        reason = also or why_left_out(raw)
        if reason:
            left_out[model_type] = reason
            continue
        subjects.append(Subject(model_type, architecture, "dense", as_text(raw)))
        if raw["model_type"] != model_type:
            aliases[model_type] = raw["model_type"]
    return Scope(tuple(subjects), left_out, aliases)


def default_config(config_class: Any, architecture: str) -> dict[str, Any]:
    """The config.json that a config class writes when nothing is set, with its architecture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {**json.loads(config_class().to_json_string(use_diff=False)), "architectures": [architecture]}


def why_left_out(raw: Mapping[str, Any]) -> str | None:
    """Why a config of a causal LM is not that of a dense, decoder-only model; None where it is."""
    kind = classify(raw)
    if kind.kind != "dense":
        return {"moe": "mixture of experts", "vlm": "vision-language model"}.get(kind.kind, kind.is_ or kind.kind)
    layers = next((key for key, value in raw.items() if _DECODER_LAYERS.fullmatch(key) and value), None)
    if layers:
        return f"half of an encoder-decoder: it counts its layers in {layers}"
    return None


def read_folder(folder: Path) -> tuple[Subject, ...]:
    """The config files in a folder: ``NAME/config.json`` or ``NAME.json``, by name.

    A file that holds no JSON object is a subject like the others: onboard has to refuse it.

    Raises:
        ValueError: there are none, or two of one name.
    """
    named = [(path.parent.name, path) for path in folder.glob("*/config.json")]
    named += [(path.stem, path) for path in folder.glob("*.json")]
    names = [name for name, _ in named]
    if not named:
        raise ValueError(f"neither NAME/config.json nor NAME.json in {folder}")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two files of one name in {folder}: {', '.join(twice)}")
    return tuple(_read(name, path) for name, path in sorted(named))


def as_text(raw: Mapping[str, Any]) -> str:
    """A config as the text of a file."""
    return json.dumps(raw, indent=2, sort_keys=True) + "\n"


def _read(name: str, path: Path) -> Subject:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        raw = json.loads(text)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        return Subject(name, "", "no JSON object", text)
    kind = classify(raw)
    return Subject(name, kind.architecture or "", kind.kind, text)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].strip()[:160]
