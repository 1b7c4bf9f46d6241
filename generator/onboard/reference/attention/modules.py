"""Which module of the reference became which native one, for the parts of an attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.pytorch_utils import Conv1D

from onboard.reference.attention.differential import ROLES
from onboard.reference.attention.fit import Fit
from onboard.reference.roles import Roles

NATIVE = "model.layers.{layer}.self_attn"


def module_rows(fits: Sequence[Fit], roles: Roles, texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every module of an attention that has parameters.

    Args:
        fits: of every layer that has an attention.
        roles: the model's parts.
        texts: expressions of ``groups`` in a fused projection, and of the numbers of heads.

    Returns:
        Rows as the contract has them. Where each head has a norm of its own, ``stacked`` is the expression of their
        number: ``{head}`` in the reference's name runs over it, and the native weight holds them along dimension 0.
    """
    setting, evidence = fits[0].setting, fits[0].evidence
    prefix = f"{roles.layers}.{{layer}}.{roles.attention}"
    rows = []
    for name, parts in setting.layout.parts:
        native = [f"{NATIVE}.{part}_proj" for part in parts]
        transposed = isinstance(evidence.attention.get_submodule(name), Conv1D)
        rows.append(_row(f"{prefix}.{name}", native, transposed, texts["groups"] if len(parts) > 1 else "1"))
    out = evidence.linears.out_path.removeprefix(f"{roles.first_attention_layer}.")
    rows.append(_row(f"{roles.layers}.{{layer}}.{out}", [f"{NATIVE}.o_proj"], evidence.transposed_out))
    norms = list(zip(("q_norm", "k_norm"), setting.qk_norm.calls, strict=True)) if setting.qk_norm else []
    if evidence.output_norm:
        norms.append(("pair_norm" if setting.lambdas else "output_norm", evidence.output_norm))
    for native_name, call in norms:
        if call.has_parameters:
            row = _row(f"{prefix}.{call.name}", [f"{NATIVE}.{native_name}"])
            if len(call.modules) > 1:
                row["stacked"] = texts["num_heads" if native_name == "q_norm" else "num_key_value_heads"]
            rows.append(row)
    if evidence.sinks:
        rows.append(_row(f"{prefix}.{evidence.sinks[0]}", [f"{NATIVE}.sinks"]))
    bias = next((found.evidence.late_bias for found in fits if found.evidence.late_bias), None)
    if bias:
        rows.append(_row(f"{prefix}.{bias}", [f"{NATIVE}.o_proj.bias"]))
    for name, role in zip(setting.lambdas, ROLES, strict=False):
        rows.append(_row(f"{prefix}.{name}", [f"{NATIVE}.{role}"]))
    return rows


def _row(reference: str, native: list[str], transposed: bool = False, groups: str = "1") -> dict[str, Any]:
    return {"reference": reference, "native": native, "transposed": transposed, "groups": groups}
