"""Checkpoints of transformers' own classes at tiny size, each with the KEY_MAP that a person would write for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onboard.spec.arch import ArchSpec, IgnoredKey, KeyRow

from .hand_made import architecture

LAYER = "model.layers.{layer}."
QKV = tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkv")
GATE_UP = (f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj")


@dataclass(frozen=True)
class Family:
    """A checkpoint's layout.

    Args:
        spec: with the hand-written rows.
        reference: the name of transformers' class.
        fields: of its tiny config.
        take_apart: a fused tensor ``[rows, ...]`` into the parts of its row, as the reference's forward pass does it
            with the projection's output.
    """

    spec: ArchSpec
    reference: str
    fields: dict[str, Any]
    take_apart: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda fused: fused.chunk(3)


def rename(disk: str, native: str, *endings: str) -> tuple[KeyRow, ...]:
    return tuple(KeyRow(f"{disk}.{end}", (f"{native}.{end}",), "rename", "[H]") for end in endings or ("weight",))


def fuse(
    disk: str, natives: tuple[str, ...], *endings: str, groups: str = "1", conv: bool = False
) -> tuple[KeyRow, ...]:
    return tuple(
        KeyRow(
            f"{disk}.{end}",
            tuple(f"{native}.{end}" for native in natives),
            "transpose, split" if conv and end == "weight" else "split",
            "[H, 3H]" if conv else "[3H, H]",
            groups,
        )
        for end in endings
    )


def conv(disk: str, native: str) -> tuple[KeyRow, ...]:
    return (
        KeyRow(f"{disk}.weight", (f"{native}.weight",), "transpose", "[H, F]"),
        KeyRow(f"{disk}.bias", (f"{native}.bias",), "rename", "[F]"),
    )


BOTH = ("weight", "bias")


def by_head(fused: torch.Tensor) -> list[torch.Tensor]:
    """GPT-NeoX and BLOOM, four heads of 6: ``[N, 3, D]``."""
    heads = fused.reshape(4, 3, 6, *fused.shape[1:])
    return [heads[:, part].reshape(24, *fused.shape[1:]) for part in range(3)]


def by_key_value_head(fused: torch.Tensor) -> list[torch.Tensor]:
    """Falcon, two key/value heads of 4 for three queries each: ``[K, N / K + 2, D]``."""
    heads = fused.reshape(2, 5, 4, *fused.shape[1:])
    parts = heads[:, :-2], heads[:, -2], heads[:, -1]
    return [part.reshape(-1, *fused.shape[1:]) for part in parts]


def by_quarter(fused: torch.Tensor) -> list[torch.Tensor]:
    """CodeGen, eight heads of 4 on four devices: ``[4, 3, N / 4 * D]``, the value before the key."""
    quarters = fused.reshape(4, 24, *fused.shape[1:])
    return [part.reshape(32, *fused.shape[1:]) for part in quarters.split(8, dim=1)]


def of_phi3(fused: torch.Tensor) -> Sequence[torch.Tensor]:
    """Six queries and two keys and values of 4, or gate and up of 36."""
    return fused.chunk(2) if len(fused) == 72 else (fused[:24], fused[24:32], fused[32:])


def llama() -> Family:
    """Pure renames of the same names, a bias that the config decides."""
    layer = "model.layers.{layer}."
    rows = rename("model.embed_tokens", "model.embed_tokens")
    for name in ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        rows += rename(layer + name, LAYER + name)
    for name in "qkvo":
        disk = f"{layer}self_attn.{name}_proj"
        rows += (*rename(disk, disk), KeyRow(f"{disk}.bias", (f"{disk}.bias",), "rename", "[H]", "1", "attention_bias"))
    rows += (*rename("model.norm", "model.norm"), *rename("lm_head", "lm_head"))
    spec = architecture(
        "LlamaConfig",
        rows,
        num_key_value_heads="config.num_key_value_heads",
        head_dim="config.head_dim",
        ignored=(IgnoredKey(f"{layer}self_attn.rotary_emb.inv_freq", "computed"),),
    )
    fields = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
    return Family(spec, "LlamaForCausalLM", fields | {"intermediate_size": 20, "num_hidden_layers": 3})


def gpt2() -> Family:
    """Conv1D, ``[q | k | v]``, learned positions, a base model's prefix."""
    h = "transformer.h.{layer}."
    rows = (
        *rename("transformer.wte", "model.embed_tokens"),
        *rename("transformer.wpe", "model.embed_positions"),
        *rename(f"{h}ln_1", f"{LAYER}input_layernorm", *BOTH),
        *fuse(f"{h}attn.c_attn", QKV, *BOTH, conv=True),
        *conv(f"{h}attn.c_proj", f"{LAYER}self_attn.o_proj"),
        *rename(f"{h}ln_2", f"{LAYER}post_attention_layernorm", *BOTH),
        *conv(f"{h}mlp.c_fc", f"{LAYER}mlp.up_proj"),
        *conv(f"{h}mlp.c_proj", f"{LAYER}mlp.down_proj"),
        *rename("transformer.ln_f", "model.norm", *BOTH),
        *rename("lm_head", "lm_head"),
    )
    spec = architecture(
        "GPT2Config",
        rows,
        ignored=(IgnoredKey(f"{h}attn.bias", "causal mask"), IgnoredKey(f"{h}attn.masked_bias", "causal mask")),
        base_prefix="transformer.",
    )
    fields = {"n_embd": 24, "n_head": 4, "n_layer": 3, "n_positions": 16, "tie_word_embeddings": True}
    return Family(spec, "GPT2LMHeadModel", fields)


def gpt_neox() -> Family:
    """q, k and v of each head beside each other."""
    h = "gpt_neox.layers.{layer}."
    rows = (
        *rename("gpt_neox.embed_in", "model.embed_tokens"),
        *rename(f"{h}input_layernorm", f"{LAYER}input_layernorm", *BOTH),
        *rename(f"{h}post_attention_layernorm", f"{LAYER}post_attention_layernorm", *BOTH),
        *fuse(f"{h}attention.query_key_value", QKV, *BOTH, groups="config.num_attention_heads"),
        *rename(f"{h}attention.dense", f"{LAYER}self_attn.o_proj", *BOTH),
        *rename(f"{h}mlp.dense_h_to_4h", f"{LAYER}mlp.up_proj", *BOTH),
        *rename(f"{h}mlp.dense_4h_to_h", f"{LAYER}mlp.down_proj", *BOTH),
        *rename("gpt_neox.final_layer_norm", "model.norm", *BOTH),
        *rename("embed_out", "lm_head"),
    )
    fields = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 20}
    return Family(architecture("GPTNeoXConfig", rows, base_prefix="gpt_neox."), "GPTNeoXForCausalLM", fields, by_head)


def _falcon(
    kv_heads: str,
    groups: str,
    fields: dict[str, Any],
    norms: dict[str, str],
    take_apart: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> Family:
    h = "transformer.h.{layer}."
    rows = (
        *rename("transformer.word_embeddings", "model.embed_tokens"),
        *(row for disk, native in norms.items() for row in rename(h + disk, LAYER + native, *BOTH)),
        *fuse(f"{h}self_attention.query_key_value", QKV, "weight", groups=groups),
        *rename(f"{h}self_attention.dense", f"{LAYER}self_attn.o_proj"),
        *rename(f"{h}mlp.dense_h_to_4h", f"{LAYER}mlp.up_proj"),
        *rename(f"{h}mlp.dense_4h_to_h", f"{LAYER}mlp.down_proj"),
        *rename("transformer.ln_f", "model.norm", *BOTH),
        *rename("lm_head", "lm_head"),
    )
    spec = architecture("FalconConfig", rows, num_key_value_heads=kv_heads, head_dim="config.head_dim")
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 2, "bias": False, "alibi": False}
    return Family(spec, "FalconForCausalLM", sizes | fields, take_apart)


def falcon() -> Family:
    """The queries of a key/value head, then its key, then its value."""
    norms = {"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"}
    fields = {"new_decoder_architecture": True, "num_kv_heads": 2}
    return _falcon("config.num_kv_heads", "config.num_kv_heads", fields, norms, by_key_value_head)


def falcon_7b() -> Family:
    """Multi-query: all queries, one key, one value."""
    fields = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
    return _falcon("1", "1", fields, {"input_layernorm": "input_layernorm"}, lambda fused: fused.split((24, 4, 4)))


def bloom() -> Family:
    """As GPT-NeoX, with a norm after the embedding; files without the base model's prefix are published."""
    h = "transformer.h.{layer}."
    rows = (
        *rename("transformer.word_embeddings", "model.embed_tokens"),
        *rename("transformer.word_embeddings_layernorm", "model.embed_norm", *BOTH),
        *rename(f"{h}input_layernorm", f"{LAYER}input_layernorm", *BOTH),
        *rename(f"{h}post_attention_layernorm", f"{LAYER}post_attention_layernorm", *BOTH),
        *fuse(f"{h}self_attention.query_key_value", QKV, *BOTH, groups="config.num_attention_heads"),
        *rename(f"{h}self_attention.dense", f"{LAYER}self_attn.o_proj", *BOTH),
        *rename(f"{h}mlp.dense_h_to_4h", f"{LAYER}mlp.up_proj", *BOTH),
        *rename(f"{h}mlp.dense_4h_to_h", f"{LAYER}mlp.down_proj", *BOTH),
        *rename("transformer.ln_f", "model.norm", *BOTH),
        *rename("lm_head", "lm_head"),
    )
    spec = architecture("BloomConfig", rows, intermediate_size="4 * config.hidden_size", base_prefix="transformer.")
    return Family(spec, "BloomForCausalLM", {"hidden_size": 24, "n_head": 4, "n_layer": 3}, by_head)


def mpt() -> Family:
    """``[q | k | v]`` without transposition."""
    h = "transformer.blocks.{layer}."
    rows = (
        *rename("transformer.wte", "model.embed_tokens"),
        *rename(f"{h}norm_1", f"{LAYER}input_layernorm"),
        *fuse(f"{h}attn.Wqkv", QKV, "weight"),
        *rename(f"{h}attn.out_proj", f"{LAYER}self_attn.o_proj"),
        *rename(f"{h}norm_2", f"{LAYER}post_attention_layernorm"),
        *rename(f"{h}ffn.up_proj", f"{LAYER}mlp.up_proj"),
        *rename(f"{h}ffn.down_proj", f"{LAYER}mlp.down_proj"),
        *rename("transformer.norm_f", "model.norm"),
        *rename("lm_head", "lm_head"),
    )
    return Family(architecture("MptConfig", rows), "MptForCausalLM", {"d_model": 24, "n_heads": 4, "n_layers": 3})


def codegen() -> Family:
    """Four groups, in each a quarter of q, then of v, then of k."""
    h = "transformer.h.{layer}."
    q, k, v = QKV
    rows = (
        *rename("transformer.wte", "model.embed_tokens"),
        *rename(f"{h}ln_1", f"{LAYER}input_layernorm", *BOTH),
        *fuse(f"{h}attn.qkv_proj", (q, v, k), "weight", groups="4"),
        *rename(f"{h}attn.out_proj", f"{LAYER}self_attn.o_proj"),
        *rename(f"{h}mlp.fc_in", f"{LAYER}mlp.up_proj", *BOTH),
        *rename(f"{h}mlp.fc_out", f"{LAYER}mlp.down_proj", *BOTH),
        *rename("transformer.ln_f", "model.norm", *BOTH),
        *rename("lm_head", "lm_head", *BOTH),
    )
    fields = {"n_embd": 32, "n_head": 8, "n_layer": 2, "rotary_dim": 4, "n_positions": 16}
    return Family(architecture("CodeGenConfig", rows), "CodeGenForCausalLM", fields, by_quarter)


def phi3() -> Family:
    """Grouped queries, ``[q | k | v]``, and ``[gate | up]``."""
    h = "model.layers.{layer}."
    rows = (
        *rename("model.embed_tokens", "model.embed_tokens"),
        *rename(f"{h}input_layernorm", f"{LAYER}input_layernorm"),
        *fuse(f"{h}self_attn.qkv_proj", QKV, "weight"),
        *rename(f"{h}self_attn.o_proj", f"{LAYER}self_attn.o_proj"),
        *rename(f"{h}post_attention_layernorm", f"{LAYER}post_attention_layernorm"),
        *fuse(f"{h}mlp.gate_up_proj", GATE_UP, "weight"),
        *rename(f"{h}mlp.down_proj", f"{LAYER}mlp.down_proj"),
        *rename("model.norm", "model.norm"),
        *rename("lm_head", "lm_head"),
    )
    spec = architecture("Phi3Config", rows, num_key_value_heads="config.num_key_value_heads")
    fields = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 36}
    return Family(spec, "Phi3ForCausalLM", fields | {"num_hidden_layers": 2, "pad_token_id": 0}, of_phi3)


FAMILIES: dict[str, Callable[[], Family]] = {
    maker.__name__: maker for maker in (llama, gpt2, gpt_neox, falcon, falcon_7b, bloom, mpt, codegen, phi3)
}


def tiny(family: Family) -> Any:
    """The reference's tiny config."""
    import transformers

    return getattr(transformers, family.spec.config_class)(vocab_size=32, **family.fields)


def reference(family: Family) -> Any:
    """The reference at tiny size, every parameter random."""
    import transformers

    model = getattr(transformers, family.reference)._from_config(tiny(family), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def native(family: Family, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors under native names, taken apart by hand; the reference of the adapter's own way."""
    state = {}
    for row in family.spec.checkpoint.rows:
        for layer in range(tiny(family).num_hidden_layers if "{layer}" in row.disk else 1):
            disk, *natives = (name.replace("{layer}", str(layer)) for name in (row.disk, *row.native))
            if disk in weights:
                tensor = weights[disk].t() if "transpose" in row.operation else weights[disk]
                parts = family.take_apart(tensor) if len(natives) > 1 else [tensor]
                state |= {name: part.contiguous() for name, part in zip(natives, parts, strict=True)}
    return state
