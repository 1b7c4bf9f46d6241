"""Errors for people: what happened, why, and what to do about it.

Every error that a user can meet is an :class:`OnboardError`. The command line prints its three lines (or, with
``--json``,
its :meth:`OnboardError.as_json`) and exits with :attr:`OnboardError.exit_status`. Anything else that reaches the
command line
is a bug of ours and exits 5.
"""

from __future__ import annotations

from typing import Any, ClassVar


class OnboardError(Exception):
    """An error with a cure.

    Args:
        what: one line, what could not be done.
        why: one line, the reason.
        do: one line, what the user can do about it.
        code: short, stable, machine-readable name such as ``"hub.gated"``; the class's own when omitted.
    """

    exit_status: ClassVar[int] = 5
    default_code: ClassVar[str] = "bug"

    def __init__(self, what: str, why: str, do: str, *, code: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.do = do
        self.code = code or self.default_code

    def as_json(self) -> dict[str, Any]:
        """The ``error`` object of the JSON output."""
        return {"code": self.code, "what": self.what, "why": self.why, "do": self.do}


class VerificationFailed(OnboardError):
    """What was generated does not agree with the reference, or has drifted."""

    exit_status = 1
    default_code = "verify.failed"


class UsageError(OnboardError):
    """The command line, or a file that it names, is not what the command needs."""

    exit_status = 2
    default_code = "usage"


class Unsupported(OnboardError):
    """The model is not one that onboard can write, and why.

    Args:
        is_: what the model is instead (``"encoder-decoder"``, ``"vision only"``, ...), or None where that is not the
            reason.
    """

    exit_status = 3
    default_code = "unsupported"

    def __init__(self, what: str, why: str, do: str, *, is_: str | None = None, code: str | None = None) -> None:
        super().__init__(what, why, do, code=code)
        self.is_ = is_


class HubError(OnboardError):
    """The Hugging Face Hub did not give what was asked for."""

    exit_status = 4
    default_code = "hub"
