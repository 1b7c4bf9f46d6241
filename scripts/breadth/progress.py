"""How a sweep shows what it does: a bar on a terminal, a line for each architecture otherwise. Both go to stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from breadth.scope import Subject


class Shown:
    """Told about each start and each end; used in a ``with`` statement."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._total, self._done = total, done
        self._running: list[str] = []
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console) if self._console.is_terminal else None
        self._task = self._bar.add_task("", total=total, completed=done) if self._bar else None

    def __enter__(self) -> Shown:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def started(self, subject: Subject) -> None:
        """A process was started."""
        self._running.append(subject.name)
        self._describe()

    def ended(self, name: str, line: str, good: bool) -> None:
        """A process has ended, with one line that says how."""
        self._done += 1
        if name in self._running:
            self._running.remove(name)
        style = "green" if good else "yellow"
        self._console.print(f"\\[{self._done}/{self._total}] [{style}]{escape(name)}[/]: {escape(line)}")
        if self._bar and self._task is not None:
            self._bar.advance(self._task)
        self._describe()

    def _describe(self) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=escape(", ".join(self._running)))
