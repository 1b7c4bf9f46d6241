"""Which packing a model can take, for what ``onboard inspect`` and REVIEW.md say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onboard.packing.families import Known, Packing, from_config
from onboard.spec.kind import Kind

_NAMES: Final[Mapping[Packing, str]] = {"offline": "offline packing (text)", "in-batch": "in-batch packing"}
_IMAGES: Final = "images are not part of the token ids that offline packing joins"


@dataclass(frozen=True)
class ModelPacking:
    """What is known of a model's packing in Megatron-Bridge.

    Attributes:
        natural: the packing that its kind asks for.
        against: for each packing what speaks against it; empty where nothing does.
        mtp: the key that says that the model predicts several tokens, and how many layers do.
    """

    natural: Packing
    against: Mapping[Packing, tuple[str, ...]]
    mtp: tuple[str, int] | None

    def as_json(self) -> dict[str, Any]:
        """The ``packing`` object of ``onboard inspect --json``."""
        return {
            "natural": self.natural,
            "offline": {"takes": not self.against["offline"], "against": list(self.against["offline"])},
            "in_batch": {"takes": not self.against["in-batch"], "against": list(self.against["in-batch"])},
            "mtp": None if self.mtp is None else {"key": self.mtp[0], "layers": self.mtp[1]},
        }

    @property
    def line(self) -> str:
        """One line for people."""
        order: tuple[Packing, ...] = ("offline", "in-batch") if self.natural == "offline" else ("in-batch", "offline")
        takes = [packing for packing in order if not self.against[packing]]
        parts = [" or ".join(takes) if takes else "none known to work"]
        parts += [f"not {packing} ({'; '.join(self.against[packing])})" for packing in order if self.against[packing]]
        if self.mtp is not None:
            parts.append(f"multi-token prediction off ({self.mtp[0]})")
        return ", ".join(parts)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The same in sentences, for REVIEW.md."""
        said = []
        for packing, name in _NAMES.items():
            reasons = self.against[packing]
            verdict = f"no: {'; '.join(reasons)}" if reasons else "nothing is known against it"
            said.append(f"{name[0].upper()}{name[1:]}: {verdict}.")
        if self.mtp is not None:
            said.append(
                f"Multi-token prediction (`{self.mtp[0]}` = {self.mtp[1]}) has to be off with either: packing does not "
                "support it."
            )
        return tuple(said)


def model_packing(config: Mapping[str, Any], kind: Kind) -> ModelPacking | None:
    """Say which packing a model can take; None for what is no decoder.

    Args:
        config: its config.json.
        kind: the classification of that.
    """
    if kind.kind == "unsupported":
        return None
    known = from_config("", config, kind.kind)
    against: dict[Packing, tuple[str, ...]] = {packing: _reasons(known, packing) for packing in _NAMES}
    if kind.kind == "vlm":
        against["offline"] = (_IMAGES, *against["offline"])
    mtp = (known.mtp_key, known.mtp_layers) if known.mtp_key is not None else None
    return ModelPacking("in-batch" if kind.kind == "vlm" else "offline", against, mtp)


def _reasons(known: Known, packing: Packing) -> tuple[str, ...]:
    return tuple(
        f"{family.name} opts out{opt_out.in_brackets}, {opt_out.who}"
        for family in known.families
        for opt_out in family.opt_outs
        if opt_out.packing == packing
    )
