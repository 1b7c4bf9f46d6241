"""Names and layouts of Bamba's tensors: checkpoint on disk against module in memory.

``KEY_MAP`` is the whole mapping, one row a kind of tensor, in both directions. ``IGNORED`` names what a checkpoint may
hold besides, and why it is not needed. Every name is matched by exactly one of them; any other is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
        shape: Shape on disk, in the letters of model.py.
        only_if: Config field without which the tensor does not exist; empty where it always does.
        layers: Whether the tensor exists in the layer of an index.
    """

    disk: str
    native: str
    operation: str
    shape: str
    only_if: str = ""
    layers: Callable[[BambaConfig, int], bool] = lambda config, layer_idx: True


def _has_mixer(config: BambaConfig, layer_idx: int) -> bool:
    """Whether a layer has a mixer."""
    return config.layer_types[layer_idx] == "linear_attention"


def _has_attention(config: BambaConfig, layer_idx: int) -> bool:
    """Whether a layer has an attention."""
    return config.layer_types[layer_idx] != "linear_attention"


KEY_MAP: tuple[KeyRow, ...] = (
    KeyRow("model.embed_tokens.weight", "model.embed_tokens.weight", "rename", "[V, H]"),
    KeyRow(
        "model.layers.{layer}.feed_forward.down_proj.weight",
        "model.layers.{layer}.mlp.down_proj.weight",
        "rename",
        "[H, F]",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.gate_proj.weight",
        "model.layers.{layer}.mlp.gate_proj.weight",
        "rename",
        "[F, H]",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.up_proj.weight",
        "model.layers.{layer}.mlp.up_proj.weight",
        "rename",
        "[F, H]",
    ),
    KeyRow(
        "model.layers.{layer}.input_layernorm.weight", "model.layers.{layer}.input_layernorm.weight", "rename", "[H]"
    ),
    KeyRow(
        "model.layers.{layer}.mamba.A_log",
        "model.layers.{layer}.mamba.A_log",
        "rename",
        "as in BambaMixer",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.mamba.D", "model.layers.{layer}.mamba.D", "rename", "as in BambaMixer", layers=_has_mixer
    ),
    KeyRow(
        "model.layers.{layer}.mamba.conv1d.bias",
        "model.layers.{layer}.mamba.conv1d.bias",
        "rename",
        "as in BambaMixer",
        "mamba_conv_bias",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.mamba.conv1d.weight",
        "model.layers.{layer}.mamba.conv1d.weight",
        "rename",
        "as in BambaMixer",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.mamba.dt_bias",
        "model.layers.{layer}.mamba.dt_bias",
        "rename",
        "as in BambaMixer",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.mamba.in_proj.weight",
        "model.layers.{layer}.mamba.in_proj.weight",
        "rename",
        "as in BambaMixer",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.mamba.norm.weight",
        "model.layers.{layer}.mamba.norm.weight",
        "rename",
        "as in BambaMixer",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.mamba.out_proj.weight",
        "model.layers.{layer}.mamba.out_proj.weight",
        "rename",
        "as in BambaMixer",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.pre_ff_layernorm.weight",
        "model.layers.{layer}.post_attention_layernorm.weight",
        "rename",
        "[H]",
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.k_proj.weight",
        "model.layers.{layer}.self_attn.k_proj.weight",
        "rename",
        "[KD, H]",
        layers=_has_attention,
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.o_proj.weight",
        "model.layers.{layer}.self_attn.o_proj.weight",
        "rename",
        "[H, H]",
        layers=_has_attention,
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.q_proj.weight",
        "model.layers.{layer}.self_attn.q_proj.weight",
        "rename",
        "[H, H]",
        layers=_has_attention,
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.v_proj.weight",
        "model.layers.{layer}.self_attn.v_proj.weight",
        "rename",
        "[KD, H]",
        layers=_has_attention,
    ),
    KeyRow(
        "model.layers.{layer}.mamba.in_proj.bias",
        "model.layers.{layer}.mamba.in_proj.bias",
        "rename",
        "as in BambaMixer",
        "mamba_proj_bias",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.mamba.out_proj.bias",
        "model.layers.{layer}.mamba.out_proj.bias",
        "rename",
        "as in BambaMixer",
        "mamba_proj_bias",
        layers=_has_mixer,
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.k_proj.bias",
        "model.layers.{layer}.self_attn.k_proj.bias",
        "rename",
        "[KD]",
        "attention_bias",
        layers=_has_attention,
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.o_proj.bias",
        "model.layers.{layer}.self_attn.o_proj.bias",
        "rename",
        "[H]",
        "attention_bias",
        layers=_has_attention,
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.q_proj.bias",
        "model.layers.{layer}.self_attn.q_proj.bias",
        "rename",
        "[H]",
        "attention_bias",
        layers=_has_attention,
    ),
    KeyRow(
        "model.layers.{layer}.self_attn.v_proj.bias",
        "model.layers.{layer}.self_attn.v_proj.bias",
        "rename",
        "[KD]",
        "attention_bias",
        layers=_has_attention,
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.down_proj.bias",
        "model.layers.{layer}.mlp.down_proj.bias",
        "rename",
        "[H]",
        "mlp_bias",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.gate_proj.bias",
        "model.layers.{layer}.mlp.gate_proj.bias",
        "rename",
        "[F]",
        "mlp_bias",
    ),
    KeyRow(
        "model.layers.{layer}.feed_forward.up_proj.bias",
        "model.layers.{layer}.mlp.up_proj.bias",
        "rename",
        "[F]",
        "mlp_bias",
    ),
    KeyRow("model.final_layernorm.weight", "model.norm.weight", "rename", "[H]"),
    KeyRow("lm_head.weight", "lm_head.weight", "rename", "[V, H]"),
)

IGNORED: dict[str, str] = {
    "model.layers.{layer}.self_attn.rotary_emb.inv_freq": "computed from the config; old files store it",
}

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LORA = re.compile(r"\.(lora_A|lora_B|lora_magnitude(?:_vector)?)(\.\w+)*$")


def _compile(pattern: str) -> re.Pattern[str]:
    """Anchor a pattern to the whole name, ``{layer}`` to one numeric path segment."""
    return re.compile(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>0|[1-9]\d*)"))


_FROM_DISK = tuple((_compile(row.disk), row.native) for row in KEY_MAP)
_IGNORED = tuple(_compile(pattern) for pattern in IGNORED)
_TO_DISK = tuple((_compile(row.native), row.disk) for row in KEY_MAP)


class BambaStateDictAdapter(StateDictAdapter):
    """Converts between the checkpoint's layout and the model's.

    Args:
        config: The model's config; ``num_hidden_layers`` bounds the layer index and ``tie_word_embeddings`` decides
            whether the head is stored.
    """

    # Every row keeps shape and dtype, so a checkpoint is read straight into the model's own memory.
    _supports_low_memory_dcp_load = True

    def __init__(self, config: BambaConfig) -> None:
        self.config = config

    def to_hf(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Convert the model's tensors to the checkpoint's layout.

        Args:
            state_dict: Native name to tensor; any subset of the model's (a pipeline stage, LoRA weights).
            **kwargs: ``exclude_key_regex`` leaves out native names that it matches.

        Returns:
            Disk name to tensor. A tied head is left out where its embedding is there; the last pipeline stage, which
            has the head alone, keeps it.

        Raises:
            KeyError: A name that no row of ``KEY_MAP`` matches.
        """
        converted: dict[str, Any] = {}
        tied = self.config.tie_word_embeddings and EMBEDDING in state_dict
        for name, tensor in state_dict.items():
            if name == HEAD and tied:
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
        """Convert the checkpoint's tensors to the model's layout.

        Args:
            hf_state_dict: Disk name to tensor; whole layers, all of them or those of one pipeline stage.
            device_mesh: Not needed, no tensor is split over experts.
            **kwargs: Ignored.

        Returns:
            Native name to tensor.

        Raises:
            KeyError: A name that no row of ``KEY_MAP`` matches, or a tensor that is missing.
            ValueError: The config ties head and embedding but the checkpoint's head differs from its embedding.
        """
        converted = {
            self.from_hf_name(name): tensor
            for name, tensor in hf_state_dict.items()
            if not any(pattern.fullmatch(name) for pattern in _IGNORED)
        }
        self._check_complete(converted)
        return self._resolve_head(converted)

    def to_hf_name(self, name: str) -> str:
        """Disk name of a native tensor."""
        return self._rename(name, _TO_DISK, "native")

    def from_hf_name(self, name: str) -> str:
        """Native name of a tensor on disk."""
        return self._rename(name, _FROM_DISK, "disk")

    def map_peft_target_module_to_hf(self, name: str, *, v4_compatible: bool = False) -> str:
        """Disk name of a module, for ``target_modules`` of PEFT's adapter_config.json."""
        return self.to_hf_name(f"{name}.weight").removesuffix(".weight")

    def _rename(self, name: str, rows: tuple[tuple[re.Pattern[str], str], ...], side: str) -> str:
        """Translate one name; LoRA tensors follow the weight that they adapt."""
        prefix = "base_model.model." if name.startswith("base_model.model.") else ""
        lora = _LORA.search(name)
        base = f"{name[len(prefix) : lora.start()]}.weight" if lora else name[len(prefix) :]
        for pattern, target in rows:
            match = pattern.fullmatch(base)
            if match is None:
                continue
            layer = match.groupdict().get("layer")
            if layer is not None and int(layer) >= self.config.num_hidden_layers:
                break
            renamed = target if layer is None else target.replace("{layer}", layer)
            return prefix + (renamed.removesuffix(".weight") + lora.group() if lora else renamed)
        raise KeyError(
            f"No row of KEY_MAP maps the {side} tensor {name!r} of a {self.config.num_hidden_layers}-layer model."
        )

    def _check_complete(self, converted: dict[str, Any]) -> None:
        """Name the first tensor that is missing beside those that are there.

        A pipeline stage holds a run of whole layers: from the first one where it has the embedding, to the last one
        where it has the final norm. Where all layers are present, the rest of the model is needed too.
        """
        if any(_LORA.search(name) for name in converted):
            return
        rows = [(row.native, row.layers) for row in KEY_MAP if not row.only_if or getattr(self.config, row.only_if)]
        count = self.config.num_hidden_layers
        by_layer = [
            [
                row.replace("{layer}", str(layer))
                for row, has_it in rows
                if "{layer}" in row and has_it(self.config, layer)
            ]
            for layer in range(count)
        ]
        beside = [row for row, _ in rows if "{layer}" not in row]
        for name in converted.keys() - set(beside).union(*by_layer):
            raise KeyError(f"No row of KEY_MAP maps {name!r}: its layer is of another kind.")
        present = [layer for layer, names in enumerate(by_layer) if any(name in converted for name in names)]
        first = 0 if EMBEDDING in converted else min(present, default=0)
        last = count - 1 if FINAL_NORM in converted else max(present, default=-1)
        needed = [name for names in by_layer[first : last + 1] for name in names]
        if not converted or len(present) == count:
            needed += beside
        for name in needed:
            if name not in converted and not (name == HEAD and self.config.tie_word_embeddings):
                raise KeyError(f"The checkpoint has no tensor for {name!r}.")

    def _resolve_head(self, converted: dict[str, Any]) -> dict[str, Any]:
        """Leave out a tied head that the checkpoint stores all the same, unless it contradicts the embedding."""
        if not (self.config.tie_word_embeddings and HEAD in converted and EMBEDDING in converted):
            return converted
        if not _equal(converted[HEAD], converted[EMBEDDING]):
            raise ValueError(
                f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING} in the checkpoint: "
                "set tie_word_embeddings=False or repair the checkpoint."
            )
        return {name: tensor for name, tensor in converted.items() if name != HEAD}


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare values; tensors on the meta device have none and count as equal."""
    return first.is_meta or second.is_meta or torch.equal(first, second)
