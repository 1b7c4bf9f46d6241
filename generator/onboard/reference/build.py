"""The reference itself: class look-up, construction at tiny size, randomised weights, checkpoint on disk."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from onboard.facts._text import shown
from onboard.reference.meanings import read
from onboard.spec.keys import data_keys


class NoReference(Exception):
    """transformers has no class for this architecture, or its config class refuses the file."""


class NoClass(NoReference):
    """transformers has no class for this architecture."""


def find_class(architecture: str, model_type: str | None) -> type[PreTrainedModel]:
    """Class of transformers that implements an architecture.

    Args:
        architecture: name in config.json's ``architectures``.
        model_type: config.json's ``model_type``; decides where transformers has no class of that name
            (``LLaMAForCausalLM``).

    Raises:
        NoClass: transformers has neither.
        NoReference: the name is that of something else in transformers.
    """
    names = [architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type or "")]
    for name in names:
        found: Any = _attribute(name) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and getattr(found, "config_class", None):
            return found
    if _attribute(architecture) is not None:
        raise NoReference(f"transformers {transformers.__version__} has no class of a model named {architecture!r}")
    raise NoClass(f"transformers {transformers.__version__} has no class {architecture!r} or model type {model_type!r}")


def _attribute(name: str) -> Any:
    """An attribute of transformers, which imports modules on demand; None where that fails."""
    try:
        return getattr(transformers, name, None)
    except Exception:  # a class whose module needs a package that is not installed
        return None


def read_config(cls: type[PreTrainedModel], raw: Mapping[str, Any]) -> PretrainedConfig:
    """The real config, read by transformers' own config class.

    Raises:
        NoReference: the class refuses the values.
    """
    fields = data_keys(raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config: PretrainedConfig = cls.config_class.from_dict(fields)
    except Exception as error:
        raise NoReference(f"{cls.config_class.__name__} refuses config.json: {_one_line(error)}") from error
    return config


def consumed_keys(cls: type[PreTrainedModel], raw: Mapping[str, Any]) -> set[str]:
    """Keys of a config.json that the config class does not declare and that change what it declares.

    Old spellings (``sliding_window_pattern``, ``rope_local_base_freq``): another number gives other fields.
    """
    config_class: Any = cls.config_class
    declared = set(config_class.__dataclass_fields__)
    base = _declared_values(config_class, raw, declared)
    consumed = set()
    for key, value in raw.items():
        if key in declared or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        try:
            other = _declared_values(config_class, {**raw, key: value + 1}, declared)
        except Exception:  # a value that the class refuses is one that it reads
            consumed.add(key)
            continue
        if other != base:
            consumed.add(key)
    return consumed


def _declared_values(config_class: Any, raw: Mapping[str, Any], declared: set[str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_class.from_dict(data_keys(raw))
    return {name: read(config, name) for name in declared}


def build(
    cls: type[PreTrainedModel], fields: Mapping[str, Any], seed: int = 0, attention: str = "eager"
) -> PreTrainedModel:
    """Build the reference from constructor arguments of its config, in fp32 on the CPU, with randomised weights."""
    config = cls.config_class(**fields)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = cls(config).float().eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def try_out(model: PreTrainedModel, length: int) -> None:
    """Run two sequences, without and with padding on the left; whatever goes wrong is raised.

    Some classes are built from sizes that do not fit each other, and only longer sequences show it.

    Args:
        model: any model; what it keeps of a run (frequencies that grow with the length) stays in it.
        length: tokens of a sequence.
    """
    input_ids = torch.ones((2, length), dtype=torch.long)
    mask = torch.ones_like(input_ids)
    mask[0, : length // 4] = 0
    model(input_ids, use_cache=False)
    model(input_ids, attention_mask=mask, use_cache=False)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter so that no mistake can hide behind an initial value of zero or one.

    Matrices are ``0.3 * N(0, 1)``, norm weights ``1 + 0.4 * N(0, 1)``, biases ``0.3 * N(0, 1)``, and so are vectors
    that start out random around zero: no factors, but what an exponential may be taken of. Drawn in the order of the
    parameters' names, so that two models with the same names get the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        random_from_the_start = bool(parameter.std(correction=0) > 0) and bool(parameter.mean().abs() < 0.5)
        if parameter.ndim == 1 and not random_from_the_start and not name.endswith("bias"):
            parameter.copy_(1 + 0.4 * noise)
        else:
            parameter.copy_(0.3 * noise)


def disk_tensors(model: PreTrainedModel, folder: Path) -> dict[str, list[int]]:
    """Save the model and read back the names and shapes that its checkpoint has on disk."""
    model.save_pretrained(folder)
    tensors: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            tensors.update({key: list(handle.get_slice(key).get_shape()) for key in handle.keys()})  # noqa: SIM118
    return tensors


def _one_line(error: BaseException) -> str:
    return shown(" ".join(str(error).split()) or type(error).__name__, 300)


def names_on_disk(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Parameter name in memory to tensor name on disk, of a model that was saved to a folder.

    They are matched by their values, which are random; parameters that a file stores in another layout are left out.
    """
    stored: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 -- no mapping, an iterator of its own
                tensor = tensors.get_tensor(name)
                stored.setdefault(tuple(tensor.shape), []).append((name, tensor))
    out = {}
    for name, parameter in model.named_parameters():
        same = [disk for disk, tensor in stored.get(tuple(parameter.shape), ()) if torch.equal(tensor, parameter)]
        if same:
            out[name] = name if name in same else same[0]
    return out
