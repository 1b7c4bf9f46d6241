"""Which model families opt out of packing, and what else of a model packing depends on.

A family is recognised by its config.json (an architecture, a model type, the type of its nested text model). Where
config.json cannot be had, the name of the model decides, and the answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from onboard.errors import HubError, OnboardError

if TYPE_CHECKING:
    from onboard.packing.settings import Settings

Packing = Literal["offline", "in-batch"]

_RECIPES: Final = "the recipes of Megatron-Bridge"
_SILENT: Final = "sequences stay unpacked, and nothing says so"


def _always(settings: Settings) -> bool:
    return True


def _without_peft(settings: Settings) -> bool:
    return settings.peft in (None, False, "none", "None")


def _split(settings: Settings) -> bool:
    return settings.pp > 1 or settings.cp > 1


@dataclass(frozen=True)
class OptOut:
    """One kind of packing that a family does not take.

    Attributes:
        packing: which kind.
        who: where this is decided.
        then: what happens to somebody who turns it on all the same.
        when: the settings under which it holds.
        only: the same in words, or nothing where it always holds.
    """

    packing: Packing
    who: str
    then: str
    when: Callable[[Settings], bool] = _always
    only: str = ""

    @property
    def in_brackets(self) -> str:
        """Where it holds, to stand behind the packing's name."""
        return f" ({self.only})" if self.only else ""


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: as its makers write it.
        architecture: matches an entry of ``architectures``.
        opt_outs: what it does not take.
        named: matches the end of a model id, where there is no config.json.
        model_types: values of ``model_type``.
        text: what ``text_config.model_type`` has to be as well; any where empty.
    """

    name: str
    architecture: str
    opt_outs: tuple[OptOut, ...]
    named: str
    model_types: frozenset[str] = frozenset()
    text: frozenset[str] = frozenset()


def _off(packing: Packing, **more: Any) -> OptOut:
    return OptOut(
        packing,
        f"off in {_RECIPES}",
        "the family is not tested with it, and its own layers may ignore where a sequence ends",
        **more,
    )


def _refused(packing: Packing, by: str, **more: Any) -> OptOut:
    return OptOut(packing, by, "it is refused at run time, after the model was built", **more)


_COLLATE: Final = "its collate function refuses packing"

FAMILIES: Final = (
    Family(
        "Qwen3-Next",
        r"Qwen3NextForCausalLM",
        (_off("offline", when=_without_peft, only="full fine-tuning"),),
        r"qwen3-(next|coder-next)",
        frozenset(("qwen3_next",)),
    ),
    Family("GLM-4.5", r"Glm4MoeForCausalLM", (_off("offline"),), r"glm-4\.[5-9](?!v)", frozenset(("glm4_moe",))),
    Family("DeepSeek-V4", r"DeepseekV4ForCausalLM", (_off("offline"),), r"deepseek-v4", frozenset(("deepseek_v4",))),
    Family(
        "Qwen3.5-VL",
        r"Qwen3_5(Moe)?ForConditionalGeneration",
        (_off("in-batch", only="every recipe but one for long context on 35B"),),
        r"qwen3\.[5-9]",
        frozenset(("qwen3_5", "qwen3_5_moe")),
    ),
    Family(
        "Ministral3-VL",
        r"Mistral3ForConditionalGeneration",
        (_off("in-batch"),),
        r"ministral-3",
        frozenset(("mistral3",)),
        frozenset(("ministral3",)),
    ),
    Family(
        "Gemma3-VL",
        r"Gemma3ForConditionalGeneration",
        (_off("in-batch"),),
        r"gemma-3-(4|12|27)b",
        frozenset(("gemma3",)),
    ),
    Family(
        "Gemma4-VL",
        r"Gemma4(Unified)?ForConditionalGeneration",
        (_off("in-batch"),),
        r"gemma-4",
        frozenset(("gemma4", "gemma4_unified")),
    ),
    Family(
        "GLM-4.5V",
        r"Glm4vMoeForConditionalGeneration",
        (_off("in-batch"),),
        r"glm-4\.[5-9]v",
        frozenset(("glm4v_moe",)),
    ),
    Family(
        "Kimi-K2.5-VL",
        r"KimiK25ForConditionalGeneration",
        (_off("in-batch"),),
        r"kimi-k2\.[5-9]",
        frozenset(("kimi_k25",)),
    ),
    Family(
        "EXAONE-4.5",
        r"Exaone4_5_ForConditionalGeneration",
        (_off("in-batch"),),
        r"exaone-4\.5",
        frozenset(("exaone4_5",)),
    ),
    Family(
        "Nemotron-Nano-v2-VL",
        r"NemotronH_Nano_VL_V2|Llama_Nemotron_Nano_VL",
        (_refused("in-batch", _COLLATE),),
        r"nemotron-nano-(\d+b-)?v2-vl|nemotron-nano-vl",
        frozenset(("NemotronH_Nano_VL_V2",)),
    ),
    Family(
        "Qwen3-Omni",
        r"Qwen3OmniMoe\w*ForConditionalGeneration",
        (_refused("in-batch", _COLLATE),),
        r"qwen3-omni",
        frozenset(("qwen3_omni_moe", "qwen3_omni_moe_thinker")),
    ),
    Family(
        "Nemotron-Omni",
        r"NemotronH_?(Nano_)?Omni\w*",
        (_off("in-batch"),),
        r"nemotron-\S*omni",
        frozenset(("nemotron_h_omni", "NemotronH_Nano_Omni_Reasoning_V3")),
    ),
    Family(
        "Qwen2.5-Omni",
        r"Qwen2_5Omni\w*",
        (_refused("in-batch", "its own code refuses packing"),),
        r"qwen2\.5-omni",
        frozenset(("qwen2_5_omni", "qwen2_5_omni_thinker")),
    ),
    Family(
        "Gemma2",
        r"Gemma2ForCausalLM",
        (
            _refused("offline", "its own attention refuses packed sequences"),
            _refused("in-batch", "its own attention refuses packed sequences"),
        ),
        r"gemma-2-",
        frozenset(("gemma2",)),
    ),
    Family(
        "LLaVA",
        r"Llava(Next|NextVideo|Onevision)?ForConditionalGeneration",
        (
            _refused(
                "in-batch",
                "its training step packs with PP 1 and CP 1 only",
                when=_split,
                only="pipeline or context parallel",
            ),
        ),
        r"llava-",
        frozenset(("llava", "llava_next", "llava_next_video", "llava_onevision")),
    ),
    Family(
        "Qwen2-Audio",
        r"Qwen2AudioForConditionalGeneration",
        (OptOut("in-batch", "its collate function does not look at the flag", _SILENT),),
        r"qwen2-audio",
        frozenset(("qwen2_audio",)),
    ),
)
"""Every family with an opt-out; one that is not here takes both kinds of packing as far as is known."""

# Where published configs count the layers of multi-token prediction.
_MTP_KEYS: Final = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_layers",
)


@dataclass(frozen=True)
class Known:
    """What is known about the model of a configuration.

    Attributes:
        label: what the user called it.
        kind: ``dense``, ``moe``, ``vlm`` or ``unsupported``; None where config.json could not be read.
        families: those it belongs to.
        mtp_layers: layers of multi-token prediction.
        mtp_key: the key that says so.
        vocab_size: tokens of the vocabulary; None where not known.
        eos_ids: the tokens that end a text.
        experts: routed experts; 0 for a dense model.
        is_: what an unsupported model is instead.
        by_name: why only the name was looked at; None where config.json was read.
    """

    label: str
    kind: str | None = None
    families: tuple[Family, ...] = ()
    mtp_layers: int = 0
    mtp_key: str | None = None
    vocab_size: int | None = None
    eos_ids: tuple[int, ...] = ()
    experts: int = 0
    is_: str | None = None
    by_name: str | None = None

    def opt_outs(self, packing: Packing, settings: Settings) -> list[tuple[Family, OptOut]]:
        """The opt-outs from one kind of packing that hold under these settings."""
        return [
            (family, opt_out)
            for family in self.families
            for opt_out in family.opt_outs
            if opt_out.packing == packing and opt_out.when(settings)
        ]


def look_up(source: str, *, revision: str | None = None) -> Known:
    """Read what packing needs to know of a model.

    A Hub that gives no config.json is no reason to fail: the family then follows from the name.

    Args:
        source: a Hub id, a directory or a config.json.
        revision: a branch, tag or commit of a model on the Hub.

    Raises:
        UsageError: a local source is missing or malformed.
    """
    from onboard.facts import read_facts
    from onboard.spec.kind import classify

    try:
        facts = read_facts(source, revision=revision, headers=False)
    except HubError as error:
        return from_name(source, error)
    kind = classify(facts.config)
    return from_config(source, facts.config, kind.kind, kind.is_)


def from_config(label: str, config: Mapping[str, Any], kind: str, is_: str | None = None) -> Known:
    """What a config.json says. Values of unexpected types are read as absent."""
    levels = [
        config,
        *(
            inner
            for key in ("text_config", "llm_config", "thinker_config")
            if isinstance(inner := config.get(key), Mapping)
        ),
    ]
    mtp_key, mtp_layers = next(
        ((key, value) for level in levels for key in _MTP_KEYS if (value := _number(level.get(key)))), (None, 0)
    )
    return Known(
        label,
        kind,
        tuple(family for family in FAMILIES if _belongs(family, config)),
        mtp_layers,
        mtp_key,
        next((value for level in levels if (value := _number(level.get("vocab_size")))), None),
        next((ids for level in levels if (ids := _ids(level.get("eos_token_id")))), ()),
        next(
            (
                value
                for level in levels
                for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
                if (value := _number(level.get(key)))
            ),
            0,
        ),
        is_,
    )


def from_name(label: str, error: OnboardError) -> Known:
    """What the name of a model says, where its config.json cannot be read."""
    name = label.rsplit("/", 1)[-1].lower()
    found = tuple(
        family for family in FAMILIES if re.match(family.named, name) or re.search(rf"[-_/]{family.named}", name)
    )
    return Known(label, families=found, by_name=error.why)


def _belongs(family: Family, config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    inner = config.get("text_config")
    text = inner.get("model_type") if isinstance(inner, Mapping) else None
    if family.text and not (isinstance(text, str) and text in family.text):
        return False
    if names:
        return any(re.fullmatch(family.architecture, name) for name in names)
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in family.model_types


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _ids(value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
