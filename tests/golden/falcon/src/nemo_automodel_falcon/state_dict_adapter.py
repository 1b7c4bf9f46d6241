"""Names and layouts of Falcon's tensors: checkpoint on disk against module in memory.

``KEY_MAP`` is the whole mapping, one row a kind of tensor, in both directions. ``IGNORED`` names what a checkpoint may
hold besides, and why it is not needed. Every name is matched by exactly one of them; any other is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import FalconConfig

from nemo_automodel.components.checkpoint.state_dict_adapter import StateDictAdapter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class KeyRow(NamedTuple):
    """One kind of tensor; ``{layer}`` stands for a layer's index.

    Attributes:
        disk: Name in the checkpoint.
        native: Names in this package's model; several where the tensor on disk is a fused one, in the order in which
            their rows lie there.
        operation: What happens to the tensor on the way.
        shape: Shape on disk, in the letters of model.py.
        groups: For a fused tensor: the number of groups that follow each other in dimension 0, after the transposition
            if there is one. Each holds an equal share of every part; one group is ``[part | part | ...]``.
        only_if: Config field without which the tensor does not exist; empty where it always does.
    """

    disk: str
    native: tuple[str, ...]
    operation: str
    shape: str
    groups: Callable[[FalconConfig], int] = lambda config: 1
    only_if: str = ""


KEY_MAP: tuple[KeyRow, ...] = (
    KeyRow("transformer.word_embeddings.weight", ("model.embed_tokens.weight",), "rename", "[V, H]"),
    KeyRow("transformer.h.{layer}.ln_attn.bias", ("model.layers.{layer}.input_layernorm.bias",), "rename", "[H]"),
    KeyRow("transformer.h.{layer}.ln_attn.weight", ("model.layers.{layer}.input_layernorm.weight",), "rename", "[H]"),
    KeyRow(
        "transformer.h.{layer}.ln_mlp.bias", ("model.layers.{layer}.post_attention_layernorm.bias",), "rename", "[H]"
    ),
    KeyRow(
        "transformer.h.{layer}.ln_mlp.weight",
        ("model.layers.{layer}.post_attention_layernorm.weight",),
        "rename",
        "[H]",
    ),
    KeyRow(
        "transformer.h.{layer}.mlp.dense_4h_to_h.weight",
        ("model.layers.{layer}.mlp.down_proj.weight",),
        "rename",
        "[H, F]",
    ),
    KeyRow(
        "transformer.h.{layer}.mlp.dense_h_to_4h.weight",
        ("model.layers.{layer}.mlp.up_proj.weight",),
        "rename",
        "[F, H]",
    ),
    KeyRow(
        "transformer.h.{layer}.self_attention.dense.weight",
        ("model.layers.{layer}.self_attn.o_proj.weight",),
        "rename",
        "[H, H]",
    ),
    KeyRow(
        "transformer.h.{layer}.self_attention.query_key_value.weight",
        (
            "model.layers.{layer}.self_attn.q_proj.weight",
            "model.layers.{layer}.self_attn.k_proj.weight",
            "model.layers.{layer}.self_attn.v_proj.weight",
        ),
        "split",
        "[2ND, H]",
        groups=lambda config: config.num_kv_heads,
    ),
    KeyRow(
        "transformer.h.{layer}.mlp.dense_4h_to_h.bias",
        ("model.layers.{layer}.mlp.down_proj.bias",),
        "rename",
        "[H]",
        only_if="bias",
    ),
    KeyRow(
        "transformer.h.{layer}.mlp.dense_h_to_4h.bias",
        ("model.layers.{layer}.mlp.up_proj.bias",),
        "rename",
        "[F]",
        only_if="bias",
    ),
    KeyRow(
        "transformer.h.{layer}.self_attention.dense.bias",
        ("model.layers.{layer}.self_attn.o_proj.bias",),
        "rename",
        "[H]",
        only_if="bias",
    ),
    KeyRow(
        "transformer.h.{layer}.self_attention.query_key_value.bias",
        (
            "model.layers.{layer}.self_attn.q_proj.bias",
            "model.layers.{layer}.self_attn.k_proj.bias",
            "model.layers.{layer}.self_attn.v_proj.bias",
        ),
        "split",
        "[2ND]",
        groups=lambda config: config.num_kv_heads,
        only_if="bias",
    ),
    KeyRow("transformer.ln_f.bias", ("model.norm.bias",), "rename", "[H]"),
    KeyRow("transformer.ln_f.weight", ("model.norm.weight",), "rename", "[H]"),
    KeyRow("lm_head.weight", ("lm_head.weight",), "rename", "[V, H]"),
)

IGNORED: dict[str, str] = {
    "transformer.h.{layer}.self_attention.rotary_emb.inv_freq": "computed from the config; old files store it",
}

# A checkpoint of the base model alone, without a head, has the same names without this.
BASE_PREFIX = "transformer."
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LORA = re.compile(r"\.(lora_A|lora_B|lora_magnitude(?:_vector)?)(\.\w+)*$")


def _compile(pattern: str) -> re.Pattern[str]:
    """Anchor a pattern to the whole name, ``{layer}`` to one numeric path segment."""
    return re.compile(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>0|[1-9]\d*)"))


def _compile_disk(pattern: str) -> re.Pattern[str]:
    """Anchor a name on disk, which may lack the base model's prefix."""
    if not pattern.startswith(BASE_PREFIX):
        return _compile(pattern)
    return re.compile(f"(?:{re.escape(BASE_PREFIX)})?{_compile(pattern.removeprefix(BASE_PREFIX)).pattern}")


_FROM_DISK = tuple((_compile_disk(row.disk), row) for row in KEY_MAP)
_IGNORED = tuple(_compile_disk(pattern) for pattern in IGNORED)
_TO_DISK = tuple((_compile(native), row) for row in KEY_MAP for native in row.native)


class _Place(NamedTuple):
    """Where a tensor stands: its row, and what its name says besides the row's pattern."""

    row: KeyRow
    prefix: str
    layer: str
    lora: str

    def name(self, pattern: str) -> str:
        """One of the row's patterns as the name of this tensor."""
        name = pattern.replace("{layer}", self.layer)
        return self.prefix + (name.removesuffix(".weight") + self.lora if self.lora else name)


class FalconStateDictAdapter(StateDictAdapter):
    """Converts between the checkpoint's layout and the model's.

    Args:
        config: The model's config; ``num_hidden_layers`` bounds the layer index and ``tie_word_embeddings`` decides
            whether the head is stored.
    """

    def __init__(self, config: FalconConfig) -> None:
        self.config = config

    @property
    def supports_low_memory_dcp_load(self) -> bool:
        """Whether each process reads its shards of the checkpoint, fused tensors into memory of their own.

        One process alone would hold whole fused tensors beside the model, and reads through host memory instead.
        """
        return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1

    @property
    def checkpoint_key_aliases(self) -> dict[str, str]:
        """Each name on disk with the base model's prefix, to the same name without it."""
        names = [
            row.disk.replace("{layer}", str(layer))
            for row in KEY_MAP
            if row.disk.startswith(BASE_PREFIX)
            for layer in range(self.config.num_hidden_layers if "{layer}" in row.disk else 1)
        ]
        return {name: name.removeprefix(BASE_PREFIX) for name in names}

    def to_hf(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Convert the model's tensors to the checkpoint's layout.

        Args:
            state_dict: Native name to tensor; any subset of the model's (a pipeline stage, LoRA weights) that has all
                parts of a fused tensor or none.
            **kwargs: ``exclude_key_regex`` leaves out native names that it matches.

        Returns:
            Disk name to tensor. A tied head is left out where its embedding is there; the last pipeline stage, which
            has the head alone, keeps it.

        Raises:
            KeyError: A name that no row of ``KEY_MAP`` matches, or a missing part of a fused tensor.
        """
        exclude = kwargs.get("exclude_key_regex")
        tied = self.config.tie_word_embeddings and EMBEDDING in state_dict
        found: dict[str, tuple[_Place, dict[str, Any]]] = {}
        for name, tensor in state_dict.items():
            if (name == HEAD and tied) or (exclude and re.match(exclude, name)):
                continue
            place = self._place(name, _TO_DISK, "native")
            _, tensors = found.setdefault(place.name(place.row.disk), (place, {}))
            tensors[name] = tensor
        converted = {name: self._to_disk(place, tensors) for name, (place, tensors) in found.items()}
        return converted

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        """Convert one tensor; see :meth:`to_hf`. A part of a fused tensor cannot be converted alone."""
        return list(self.to_hf({fqn: tensor}, **kwargs).items())

    def from_hf(
        self, hf_state_dict: dict[str, Any], device_mesh: DeviceMesh | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Convert the checkpoint's tensors to the model's layout.

        Args:
            hf_state_dict: Disk name to tensor; whole layers, all of them or those of one pipeline stage.
            device_mesh: Not needed, no tensor is split over experts.
            **kwargs: Ignored.

        Returns:
            Native name to tensor; parts of a fused one may be views of it.

        Raises:
            KeyError: A name that no row of ``KEY_MAP`` matches, or a tensor that is missing.
            ValueError: The config ties head and embedding but the checkpoint's head differs from its embedding;
                or a fused tensor has not the rows that the config asks for;
                or a tensor is there twice, with and without the base model's prefix.
        """
        converted: dict[str, Any] = {}
        for name, tensor in hf_state_dict.items():
            if any(pattern.fullmatch(name) for pattern in _IGNORED):
                continue
            parts = self._from_disk(name, tensor)
            if converted.keys() & parts.keys():
                raise ValueError(f"The checkpoint has {name!r} with and without {BASE_PREFIX!r}.")
            converted.update(parts)
        self._check_complete(converted)
        return self._resolve_head(converted)

    def to_hf_name(self, name: str) -> str:
        """Disk name of a native tensor; parts of a fused one share it."""
        place = self._place(name, _TO_DISK, "native")
        return place.name(place.row.disk)

    def from_hf_names(self, name: str) -> list[str]:
        """Native names of a tensor on disk, more than one where it is a fused one."""
        place = self._place(name, _FROM_DISK, "disk")
        return [place.name(native) for native in place.row.native]

    def map_peft_target_module_to_hf(self, name: str, *, v4_compatible: bool = False) -> str:
        """Disk name of a module, for ``target_modules`` of PEFT's adapter_config.json."""
        return self.to_hf_name(f"{name}.weight").removesuffix(".weight")

    def _place(self, name: str, rows: tuple[tuple[re.Pattern[str], KeyRow], ...], side: str) -> _Place:
        """Find the row of a name; LoRA tensors follow the weight that they adapt."""
        prefix = "base_model.model." if name.startswith("base_model.model.") else ""
        lora = _LORA.search(name)
        base = f"{name[len(prefix) : lora.start()]}.weight" if lora else name[len(prefix) :]
        for pattern, row in rows:
            match = pattern.fullmatch(base)
            if match is None:
                continue
            layer = match.groupdict().get("layer", "")
            if layer and int(layer) >= self.config.num_hidden_layers:
                break
            return _Place(row, prefix, layer, lora.group() if lora else "")
        raise KeyError(
            f"No row of KEY_MAP maps the {side} tensor {name!r} of a {self.config.num_hidden_layers}-layer model."
        )

    def _to_disk(self, place: _Place, tensors: dict[str, Any]) -> Any:
        """Make one tensor of the checkpoint from the native ones that it consists of.

        Args:
            place: The row.
            tensors: Native name to tensor; a weight is ``[out, in]``, a bias ``[out]``.
        """
        names = [place.name(native) for native in place.row.native]
        for name in names:
            if name not in tensors:
                raise KeyError(
                    f"{place.name(place.row.disk)!r} needs all of its {len(names)} parts, and {name!r} is not given. "
                    "Convert (or adapt by LoRA) all of them at once."
                )
        parts = [tensors[name] for name in names]
        tensor = self._join(place, parts) if len(parts) > 1 else parts[0]
        return tensor

    def _from_disk(self, name: str, tensor: Any) -> dict[str, Any]:
        """Make the native tensors of one of the checkpoint, by their names."""
        place = self._place(name, _FROM_DISK, "disk")
        names = [place.name(native) for native in place.row.native]
        parts = self._split(place, tensor) if len(names) > 1 else [tensor]
        return dict(zip(names, parts, strict=True))

    def _join(self, place: _Place, parts: Sequence[Any]) -> Any:
        """Fuse native tensors.

        LoRA's updates ``B_i A_i`` of the parts are kept exactly: the fused A is ``[A_1; A_2; ...]``, and the rows of
        part i in the fused B are zero but for the columns that meet ``A_i``. The rank is the sum of theirs, which PEFT
        has to be told (``rank_pattern``, and ``alpha_pattern`` so that alpha / rank stays what it is).
        """
        if place.lora.startswith(".lora_A"):
            return torch.cat(tuple(parts))
        rows, given = self._rows(place), [len(part) for part in parts]
        if given != rows:
            raise ValueError(f"{place.name(place.row.disk)!r} needs parts of {rows} rows, those given have {given}.")
        if place.lora.startswith(".lora_B"):
            parts = torch.block_diag(*parts).split(rows)
        return _join_rows(parts, place.row.groups(self.config))

    def _split(self, place: _Place, tensor: Any) -> list[Any]:
        """Take a fused tensor apart; see :meth:`_join`."""
        name, rows = place.name(place.row.disk), self._rows(place)
        if place.lora.startswith(".lora_A"):
            if len(tensor) % len(rows):
                raise ValueError(f"{name!r} has rank {len(tensor)}, which {len(rows)} projections cannot share.")
            return list(tensor.chunk(len(rows)))
        if len(tensor) != sum(rows):
            raise ValueError(f"{name!r} has {len(tensor)} rows where the config asks for {' + '.join(map(str, rows))}.")
        parts = _split_rows(tensor, rows, place.row.groups(self.config))
        if place.lora.startswith(".lora_B"):
            own = [part.chunk(len(rows), dim=1)[i] for i, part in enumerate(parts)]
            if not _equal(torch.block_diag(*own), torch.cat(parts)):
                raise ValueError(
                    f"{name!r} adapts {len(rows)} projections by a rank that they share; the model cannot."
                )
            return own
        return parts

    def _rows(self, place: _Place) -> list[int]:
        """Rows of each part of a fused tensor."""
        rows = _rows_of(self.config)
        return [rows[native.split(".")[-2]] for native in place.row.native]

    def _check_complete(self, converted: dict[str, Any]) -> None:
        """Name the first tensor that is missing beside those that are there.

        A pipeline stage holds a run of whole layers: from the first one where it has the embedding, to the last one
        where it has the final norm. Where all layers are present, the rest of the model is needed too.
        """
        if any(_LORA.search(name) for name in converted):
            return
        rows = [
            native for row in KEY_MAP if not row.only_if or getattr(self.config, row.only_if) for native in row.native
        ]
        per_layer = [row for row in rows if "{layer}" in row]
        count = self.config.num_hidden_layers
        present = [
            layer for layer in range(count) if any(row.replace("{layer}", str(layer)) in converted for row in per_layer)
        ]
        first = 0 if EMBEDDING in converted else min(present, default=0)
        last = count - 1 if FINAL_NORM in converted else max(present, default=-1)
        needed = [row.replace("{layer}", str(layer)) for layer in range(first, last + 1) for row in per_layer]
        if not converted or len(present) == count:
            needed += [row for row in rows if row not in per_layer]
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


def _rows_of(config: FalconConfig) -> dict[str, int]:
    """Rows of the projections that are stored as parts of a fused tensor."""
    head_dim = config.head_dim
    return {
        "q_proj": config.num_attention_heads * head_dim,
        "k_proj": config.num_kv_heads * head_dim,
        "v_proj": config.num_kv_heads * head_dim,
    }


def _join_rows(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """Fuse tensors along dimension 0.

    Args:
        parts: Weights ``[rows_i, in]`` or biases ``[rows_i]``.
        groups: Number of groups; each takes the next ``rows_i / groups`` rows of every part, in order.

    Returns:
        ``[rows_1 + rows_2 + ..., in]`` or ``[rows_1 + rows_2 + ...]``.
    """
    grouped = [_whole_rows(part).unflatten(0, (groups, -1)) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _split_rows(tensor: torch.Tensor, rows: Sequence[int], groups: int) -> list[torch.Tensor]:
    """Take apart what :func:`_join_rows` fused.

    Args:
        tensor: ``[rows_1 + rows_2 + ..., in]`` or ``[rows_1 + rows_2 + ...]``.
        rows: Rows of each part.
        groups: Number of groups.

    Returns:
        The parts; views of the tensor where there is one group.
    """
    grouped = _whole_rows(tensor).unflatten(0, (groups, -1))
    return [part.flatten(0, 1) for part in grouped.split([count // groups for count in rows], dim=1)]


def _whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Let every process hold a part of each row instead of some of the rows; what is not sharded stays as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    sharded = Shard(1) if tensor.ndim > 1 else Replicate()
    return tensor.redistribute(placements=[Replicate() if at.is_replicate() else sharded for at in tensor.placements])
