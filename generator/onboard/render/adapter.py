"""What the templates of the state dict adapter and of its tests are given beside the spec."""

from __future__ import annotations

import ast
from typing import Any

from onboard.spec.arch import ArchSpec, KeyRow


def adapter_context(spec: ArchSpec) -> dict[str, Any]:
    """Questions that the adapter's templates ask, and the expressions that they render.

    Args:
        spec: the architecture; its ``checkpoint`` says what is done to which tensor.

    Returns:
        ``splits``, ``transposes``, ``regroups`` (one of the two): which operations there are. ``part_rows``: projection
        to the expression of its rows, of those that are stored as parts of a fused tensor. ``renames_modules``: whether
        a module has another name on disk. ``has_final_norm``: whether the final norm has a tensor. ``base_prefix``;
        ``has_conditional_rows`` and ``fused_conditionally``: whether some rows, or some that are split, depend on the
        config. ``has_layer_rows``: whether some exist in some layers alone; ``layer_rows``: the expressions of these
        layers to the functions that they are rendered as.
    """
    rows = spec.checkpoint.rows
    splits = any("split" in row.operation for row in rows)
    transposes = any("transpose" in row.operation for row in rows)
    return {
        "splits": splits,
        "transposes": transposes,
        "regroups": splits or transposes,
        "part_rows": part_rows(spec),
        "renames_modules": any(row.native != (row.disk,) for row in rows),
        "has_final_norm": any("model.norm.weight" in row.native for row in rows),
        "has_conditional_rows": any(row.only_if for row in rows),
        "has_layer_rows": any(row.layers for row in rows),
        "layer_rows": {row.layers: _layer_function(row) for row in rows if row.layers},
        "fused_conditionally": any(row.only_if for row in fused(spec)),
        "base_prefix": spec.checkpoint.base_prefix,
    }


def _layer_function(row: KeyRow) -> str:
    """Name of the function that says whether a layer has a row's tensor."""
    if "layer_types" not in row.layers:
        return "_has_output_bias" if row.native[0].endswith(".o_proj.bias") else "_has_attention_norm"
    return "_has_attention" if " != " in row.layers else "_has_mixer"


def part_rows(spec: ArchSpec) -> dict[str, str]:
    """Projection to the expression of its output features, for those that some row takes from a fused tensor.

    Queries have ``N * D`` rows, keys and values ``K * D``, gate and up ``F``. ``head_dim`` stands for ``D``.

    Raises:
        ValueError: a fused tensor has a part that is none of these.
    """
    attention, gate = spec.attention, spec.attention.gate
    query, key_value = (
        f"{_factor(heads)} * head_dim" for heads in (attention.num_heads, attention.num_key_value_heads)
    )
    feed_forward = spec.mlp.intermediate_size
    known = {
        "q_proj": query,
        "g_proj": query if gate is None or gate.over == "element" else attention.num_heads,
        "k_proj": key_value,
        "v_proj": key_value,
        "gate_proj": feed_forward,
        "up_proj": feed_forward,
    }
    parts = {module(native) for row in fused(spec) for native in row.native}
    unknown = sorted(parts - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]} is a part of a fused tensor, but its rows are not known")
    return {name: rows for name, rows in known.items() if name in parts}


def module(native: str) -> str:
    """The module that a tensor belongs to: ``q_proj`` of ``model.layers.{layer}.self_attn.q_proj.weight``."""
    return native.split(".")[-2]


def fused(spec: ArchSpec) -> tuple[KeyRow, ...]:
    """The rows that are split."""
    return tuple(row for row in spec.checkpoint.rows if len(row.native) > 1)


def _factor(expression: str) -> str:
    """An expression as a factor of a product, in parentheses where it needs them."""
    node = ast.parse(expression, mode="eval").body
    atom = isinstance(node, ast.Attribute | ast.Name | ast.Constant | ast.Call | ast.Subscript)
    return expression if atom else f"({expression})"
