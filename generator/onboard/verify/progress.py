"""What a long step reports to."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Implemented by the command line, and by nothing at all where nobody looks."""

    def start(self, label: str, total: int | None = None) -> None:
        """A step begins, with the number of its parts where that is known."""

    def advance(self, n: int = 1, note: str | None = None) -> None:
        """The step went on by ``n`` parts."""

    def done(self, note: str | None = None) -> None:
        """The step is over."""
