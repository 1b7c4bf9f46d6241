"""Names of Bamba's tensors: checkpoint on disk against module in memory.

``KEY_MAP`` is the whole mapping, one row a kind of tensor, in both directions. ``IGNORED`` names what a checkpoint may
hold besides; any other name is an error. Which tensors a model of this config has is the reused modules' own business:
the adapter is told their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import BambaConfig

from nemo_automodel.components.checkpoint.state_dict_adapter import StateDictAdapter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class KeyRow(NamedTuple):
    """One kind of tensor; ``{layer}`` stands for a layer's index.

    Attributes:
        disk: Name in the checkpoint.
        native: Name in this package's model.
        operation: What happens to the tensor on the way.
        shape: Shape in the published model; empty where it has no such tensor.
        only_if: Config field that decides whether the tensor exists; empty where nothing does.
    """

    disk: str
    native: str
    operation: str
    shape: str
    only_if: str = ""


KEY_MAP: tuple[KeyRow, ...] = (
    KeyRow("lm_head.weight", "lm_head.weight", "rename", "[128256, 4096]"),
    KeyRow("model.embed_tokens.weight", "model.embed_tokens.weight", "rename", "[128256, 4096]"),
    KeyRow("model.final_layernorm.weight", "model.final_layernorm.weight", "rename", "[4096]"),
    KeyRow(
        "model.layers.{layer}.feed_forward.down_proj.weight",
        "model.layers.{layer}.feed_forward.down_proj.weight",
        "rename",
        "[4096, 14336]",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.gate_proj.weight",
        "model.layers.{layer}.feed_forward.gate_proj.weight",
        "rename",
        "[14336, 4096]",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.up_proj.weight",
        "model.layers.{layer}.feed_forward.up_proj.weight",
        "rename",
        "[14336, 4096]",
    ),
    KeyRow(
        "model.layers.{layer}.input_layernorm.weight", "model.layers.{layer}.input_layernorm.weight", "rename", "[4096]"
    ),
    KeyRow("model.layers.{layer}.mamba.A_log", "model.layers.{layer}.mamba.A_log", "rename", "[128]"),
    KeyRow("model.layers.{layer}.mamba.D", "model.layers.{layer}.mamba.D", "rename", "[128]"),
    KeyRow(
        "model.layers.{layer}.mamba.conv1d.bias",
        "model.layers.{layer}.mamba.conv1d.bias",
        "rename",
        "[8448]",
        "mamba_conv_bias",
    ),
    KeyRow(
        "model.layers.{layer}.mamba.conv1d.weight", "model.layers.{layer}.mamba.conv1d.weight", "rename", "[8448, 1, 4]"
    ),
    KeyRow("model.layers.{layer}.mamba.dt_bias", "model.layers.{layer}.mamba.dt_bias", "rename", "[128]"),
    KeyRow(
        "model.layers.{layer}.mamba.in_proj.weight",
        "model.layers.{layer}.mamba.in_proj.weight",
        "rename",
        "[16768, 4096]",
    ),
    KeyRow("model.layers.{layer}.mamba.norm.weight", "model.layers.{layer}.mamba.norm.weight", "rename", "[8192]"),
    KeyRow(
        "model.layers.{layer}.mamba.out_proj.weight",
        "model.layers.{layer}.mamba.out_proj.weight",
        "rename",
        "[4096, 8192]",
    ),
    KeyRow(
        "model.layers.{layer}.pre_ff_layernorm.weight",
        "model.layers.{layer}.pre_ff_layernorm.weight",
        "rename",
        "[4096]",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.k_proj.weight",
        "model.layers.{layer}.self_attn.k_proj.weight",
        "rename",
        "[1024, 4096]",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.o_proj.weight",
        "model.layers.{layer}.self_attn.o_proj.weight",
        "rename",
        "[4096, 4096]",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.q_proj.weight",
        "model.layers.{layer}.self_attn.q_proj.weight",
        "rename",
        "[4096, 4096]",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.v_proj.weight",
        "model.layers.{layer}.self_attn.v_proj.weight",
        "rename",
        "[1024, 4096]",
    ),
    KeyRow(
        "model.layers.{layer}.mamba.in_proj.bias",
        "model.layers.{layer}.mamba.in_proj.bias",
        "rename",
        "",
        "mamba_proj_bias",
    ),
    KeyRow(
        "model.layers.{layer}.mamba.out_proj.bias",
        "model.layers.{layer}.mamba.out_proj.bias",
        "rename",
        "",
        "mamba_proj_bias",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.k_proj.bias",
        "model.layers.{layer}.self_attn.k_proj.bias",
        "rename",
        "",
        "attention_bias",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.o_proj.bias",
        "model.layers.{layer}.self_attn.o_proj.bias",
        "rename",
        "",
        "attention_bias",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.q_proj.bias",
        "model.layers.{layer}.self_attn.q_proj.bias",
        "rename",
        "",
        "attention_bias",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.v_proj.bias",
        "model.layers.{layer}.self_attn.v_proj.bias",
        "rename",
        "",
        "attention_bias",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.down_proj.bias",
        "model.layers.{layer}.feed_forward.down_proj.bias",
        "rename",
        "",
        "mlp_bias",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.gate_proj.bias",
        "model.layers.{layer}.feed_forward.gate_proj.bias",
        "rename",
        "",
        "mlp_bias",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.up_proj.bias",
        "model.layers.{layer}.feed_forward.up_proj.bias",
        "rename",
        "",
        "mlp_bias",
    ),
)

IGNORED: dict[str, str] = {
    "rotary_emb\\.inv_freq$": "computed from the config; old files store it",
}
"""Regular expressions that are searched in the names of tensors which no row maps, and why they are not needed."""

_PLACE = re.compile(r"\{(?:layer|index)\}")
_LORA = re.compile(r"\.(lora_A|lora_B|lora_magnitude(?:_vector)?)(\.\w+)*$")


def _compile(pattern: str) -> re.Pattern[str]:
    """Anchor a pattern to the whole name, a place to one numeric path segment."""
    return re.compile(re.escape(pattern).replace(r"\{layer\}", r"(0|[1-9]\d*)"))


_FROM_DISK = tuple((_compile(row.disk), row.native) for row in KEY_MAP)
_TO_DISK = tuple((_compile(row.native), row.disk) for row in KEY_MAP)


class BambaStateDictAdapter(StateDictAdapter):
    """Converts between the checkpoint's names and the model's.

    Args:
        config: The model's config.
        names: Names of all tensors that the model has.
        shared: Names of tensors that are another one's, such as a tied head, to that one's name. They are stored once.
        ignored: Further regular expressions for names on disk, of tensors that the reused modules do not need.
    """

    # Every row keeps shape and dtype, so a checkpoint is read straight into the model's own memory.
    _supports_low_memory_dcp_load = True

    def __init__(
        self, config: BambaConfig, names: Iterable[str], shared: Mapping[str, str], ignored: Iterable[str] = ()
    ) -> None:
        self.config = config
        self.names = frozenset(names)
        self.shared = dict(shared)
        self.ignored = tuple(re.compile(pattern) for pattern in (*IGNORED, *ignored))

    def to_hf(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Convert the model's tensors to the checkpoint's names.

        Args:
            state_dict: Native name to tensor; any subset of the model's (LoRA weights).
            **kwargs: ``exclude_key_regex`` leaves out native names that it matches.

        Returns:
            Disk name to tensor. A shared tensor is left out where the one that it equals is there.

        Raises:
            KeyError: A name that no row of ``KEY_MAP`` matches.
        """
        converted: dict[str, Any] = {}
        for name, tensor in state_dict.items():
            if self.shared.get(name) in state_dict:
                continue
            converted.update(self.convert_single_tensor_to_hf(name, tensor, **kwargs))
        return converted

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        """Convert one tensor; see :meth:`to_hf`."""
        exclude = kwargs.get("exclude_key_regex")
        if exclude and re.match(exclude, fqn):
            return []
        return [(self.to_hf_name(fqn), tensor)]

    def from_hf(
        self, hf_state_dict: dict[str, Any], device_mesh: DeviceMesh | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Convert the checkpoint's tensors to the model's names.

        Args:
            hf_state_dict: Disk name to tensor, all of the model's or LoRA weights.
            device_mesh: Not needed, no tensor is split.
            **kwargs: Ignored.

        Returns:
            Native name to tensor, without those that are shared.

        Raises:
            KeyError: A name that no row of ``KEY_MAP`` matches, or a tensor that is missing.
            ValueError: Two tensors are one in this model, but differ in the checkpoint.
        """
        converted: dict[str, Any] = {}
        for name, tensor in hf_state_dict.items():
            native = self._renamed(name, _FROM_DISK, "disk")
            if native is not None:
                converted[native] = tensor
            elif not any(pattern.search(name) for pattern in self.ignored):
                raise _unknown(name, "disk")
        if not any(_LORA.search(name) for name in converted):
            for name in sorted(self.names - self.shared.keys()):
                if name not in converted:
                    raise KeyError(f"The checkpoint has no tensor for {name!r}.")
        return self._without_shared(converted)

    def to_hf_name(self, name: str) -> str:
        """Disk name of a native tensor."""
        renamed = self._renamed(name, _TO_DISK, "native")
        if renamed is None:
            raise _unknown(name, "native")
        return renamed

    def from_hf_name(self, name: str) -> str:
        """Native name of a tensor on disk."""
        renamed = self._renamed(name, _FROM_DISK, "disk")
        if renamed is None:
            raise _unknown(name, "disk")
        return renamed

    def _renamed(self, name: str, rows: tuple[tuple[re.Pattern[str], str], ...], side: str) -> str | None:
        """Translate one name, None where the model has no such tensor; LoRA tensors follow the weight they adapt."""
        prefix = "base_model.model." if name.startswith("base_model.model.") else ""
        lora = _LORA.search(name)
        base = f"{name[len(prefix) : lora.start()]}.weight" if lora else name[len(prefix) :]
        for pattern, target in rows:
            match = pattern.fullmatch(base)
            if match is None:
                continue
            renamed = _PLACE.sub("{}", target).format(*match.groups())
            if (renamed if side == "disk" else base) in self.names:
                return prefix + (renamed.removesuffix(".weight") + lora.group() if lora else renamed)
        return None

    def _without_shared(self, converted: dict[str, Any]) -> dict[str, Any]:
        """Leave out shared tensors that the checkpoint stores all the same, unless they contradict each other."""
        for name, source in self.shared.items():
            if name in converted and source in converted and not _equal(converted[name], converted[source]):
                raise ValueError(
                    f"{name} and {source} are one tensor in this model (tie_word_embeddings), but differ in the "
                    "checkpoint: set tie_word_embeddings=False or repair the checkpoint."
                )
        return {name: tensor for name, tensor in converted.items() if name not in self.shared}


def _unknown(name: str, side: str) -> KeyError:
    return KeyError(f"No row of KEY_MAP maps the {side} tensor {name!r} to one that this model has.")


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare values; tensors on the meta device have none and count as equal."""
    return first.is_meta or second.is_meta or torch.equal(first, second)
