"""What a reference can do itself: a package that reuses it can be held to that, and to nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from onboard.reference.build import build, randomise
from onboard.reference.record import close
from onboard.reference.tiny import SEQUENCE

_STATES = ("past_key_values", "cache_params", "state", "mems")
"""Arguments by which classes take the state of earlier tokens."""
_LENGTHS = (7, 17)
_LEARNING_RATES = (3e-3, 1e-2, 1e-3, 3e-2, 3e-4)
STEPS = 10
FALL = 0.95
"""What the loss falls to, in units of the first one, in a test of ``STEPS`` steps."""


def measure_support(
    cls: type[PreTrainedModel],
    fields: Mapping[str, Any],
    variants: Mapping[str, Mapping[str, Any]],
    input_ids: torch.Tensor,
) -> dict[str, Any]:
    """Try what a training framework or ``generate`` may ask for; masks of documents in every setting.

    Returns:
        For each ability True, or a string with the reason why not; further ``arguments`` (of the forward pass),
        ``state_argument``, ``sdpa``, ``dropouts``, ``fresh_loss`` (above that of a uniform prediction),
        ``experts_implementation`` (whether the class lets one choose how experts are computed) and ``learning_rate``
        (with which the randomised tiny model learns a batch).
    """
    parameters = inspect.signature(cls.forward).parameters
    arguments = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    found: dict[str, Any] = {
        "arguments": arguments,
        "state_argument": next((name for name in _STATES if name in arguments), None),
        "sdpa": bool(cls._supports_sdpa),
        "dropouts": _dropouts(cls, fields, input_ids),
        "fresh_loss": fresh_loss(cls, fields, input_ids),
        "created_in_fp32": _created_in_fp32(cls, fields),
        "experts_implementation": cls._can_set_experts_implementation(),
        "learning_rate": _learning_rate(cls, fields),
    }
    for name, attempt in _ATTEMPTS.items():
        try:
            for setting in ({}, *variants.values()) if name == "block_mask" else ({},):
                attempt(build(cls, {**fields, **setting}), input_ids)
            found[name] = True
        except Exception as error:
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
    if "attention_mask" not in parameters:
        found["padding"] = "it takes no attention_mask"
    if not cls.supports_gradient_checkpointing:
        found["gradient_checkpointing"] = "the class does not support it"
    return found


@torch.no_grad()
def _padding(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    mask = torch.ones_like(input_ids)
    mask[0, :5] = 0
    padded, plain = model(input_ids, attention_mask=mask).logits, model(input_ids).logits
    _finite(padded[mask.bool()])
    if close(padded[mask.bool()], plain[mask.bool()]) is not None:
        raise ValueError("it does not heed the attention_mask")


@torch.no_grad()
def _block_mask(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Two documents in one row are what they are alone."""
    first, second = _LENGTHS
    mask = torch.block_diag(torch.ones(first, first).tril(), torch.ones(second, second).tril()).bool()
    positions = torch.cat((torch.arange(first), torch.arange(second))).unsqueeze(0)
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    packed = model(input_ids, attention_mask=mask[None, None], position_ids=positions).logits
    alone = torch.cat([model(part).logits for part in input_ids.split(_LENGTHS, dim=1)], dim=1)
    if close(packed, alone, 1e-4) is None:
        raise ValueError("a mask of documents does not keep them apart")


@torch.no_grad()
def _generation(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    made = model.generate(input_ids[:, :9].expand(2, -1), **options)
    if made.shape != (2, 21):
        raise ValueError(f"it gives {list(made.shape)} tokens for 2 prompts of 9 and 12 new ones")


@torch.no_grad()
def _bf16(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    with local_torch_dtype(torch.bfloat16):
        low = type(model)(model.config).eval()
    randomise(low)
    _finite(low(input_ids).logits)


def _gradient_checkpointing(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    model.train().gradient_checkpointing_enable()
    model(input_ids, labels=input_ids).loss.backward()


@torch.no_grad()
def _hidden_states(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    states = model(input_ids, output_hidden_states=True).hidden_states
    if not isinstance(states, tuple) or not states:
        raise ValueError("it returns none")


@torch.no_grad()
def _inputs_embeds(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    made = model(inputs_embeds=model.get_input_embeddings()(input_ids)).logits
    if close(made, model(input_ids).logits) is None:
        raise ValueError("embeddings that are given directly have another meaning")


@torch.no_grad()
def _logits_to_keep(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    if close(model(input_ids, logits_to_keep=3).logits, model(input_ids).logits[:, -3:]) is None:
        raise ValueError("it gives other logits")


def _finite(tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise ValueError("its logits are not finite")


_ATTEMPTS: dict[str, Callable[[PreTrainedModel, torch.Tensor], None]] = {
    "padding": _padding,
    "block_mask": _block_mask,
    "generation": _generation,
    "bf16": _bf16,
    "gradient_checkpointing": _gradient_checkpointing,
    "hidden_states": _hidden_states,
    "inputs_embeds": _inputs_embeds,
    "logits_to_keep": _logits_to_keep,
}


def _learning_rate(cls: type[PreTrainedModel], fields: Mapping[str, Any]) -> float:
    """A learning rate with which the loss on one batch falls; layers that run again and again may need another one."""
    generator = torch.Generator().manual_seed(7)
    # A state of earlier tokens is of no use in training, and some classes cannot keep one for all of their layers.
    options = {"use_cache": False} if "use_cache" in inspect.signature(cls.forward).parameters else {}
    found: dict[float, float] = {}
    for rate in _LEARNING_RATES:
        model = build(cls, fields).train()
        ids = torch.randint(3, model.config.vocab_size, (2, SEQUENCE), generator=generator.manual_seed(7))
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        losses = []
        for _ in range(STEPS):
            loss = model(ids, labels=ids, **options).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[rate] = losses[-1] / losses[0]
        if found[rate] < FALL - 0.02:
            return rate
    return min(found, key=lambda rate: found[rate])


@torch.no_grad()
def _dropouts(cls: type[PreTrainedModel], fields: Mapping[str, Any], input_ids: torch.Tensor) -> list[str]:
    """Config fields that drop values in training."""
    names = []
    for name, value in fields.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or ("drop" not in name):
            continue
        try:
            model = build(cls, {**fields, name: 0.5})
            plain = model(input_ids).logits
            torch.manual_seed(0)
            if not torch.allclose(model.train()(input_ids).logits, plain):
                names.append(name)
        except Exception:  # a class that refuses dropout
            continue
    return names


def _created_in_fp32(cls: type[PreTrainedModel], fields: Mapping[str, Any]) -> bool:
    """Whether a parameter does not follow the default dtype."""
    with local_torch_dtype(torch.bfloat16):
        model = cls(cls.config_class(**fields))
    return any(parameter.dtype == torch.float32 for parameter in model.parameters())


@torch.no_grad()
def left_alone(cls: type[PreTrainedModel], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameters that ``initialize_weights`` leaves as a module's constructor made them.

    A framework that builds without memory never sees the constructor's values, and has to be told.

    Returns:
        ``ending`` of their names, and their ``value`` where it is one number in all of them, else None.
    """
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(cls(cls.config_class(**fields)))
    made = [dict(model.named_parameters()) for model in models]
    values = [{name: parameter.clone() for name, parameter in one.items()} for one in made]
    for parameter in made[0].values():
        parameter.fill_(torch.nan)
        parameter._is_hf_initialized = False
    for module in models[0].modules():
        module._is_hf_initialized = False
    models[0].initialize_weights()
    endings: dict[str, set[float]] = {}
    for name, parameter in made[0].items():
        if not torch.isfinite(parameter).all():
            found = {number for one in values for number in one[name].unique().tolist()}
            endings.setdefault(re.split(r"\.\d+\.", name)[-1], set()).update(found)
    return [
        {"ending": ending, "value": numbers.pop() if len(numbers) == 1 else None} for ending, numbers in endings.items()
    ]


@torch.no_grad()
def fresh_loss(cls: type[PreTrainedModel], fields: Mapping[str, Any], input_ids: torch.Tensor) -> float:
    """Loss of freshly initialised weights, above that of a uniform prediction."""
    torch.manual_seed(0)
    config: PretrainedConfig = cls.config_class(**fields)
    model = cls(config).float().eval()
    loss: float = model(input_ids, labels=input_ids).loss.item()
    return loss - float(torch.tensor(float(config.vocab_size)).log())
