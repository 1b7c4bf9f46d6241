"""Writing a plan: all of its files, or none.

A new project (plugin) is made in a working folder beside its final place and swapped in with one rename; see
:mod:`onboard.plan._project`. A checkout (intree) is changed file by file under a journal; see
:mod:`onboard.plan._checkout`. Either way an error or a signal rolls everything back before it goes on, and what a
killed run left is put right by the next one, or by :func:`recover`. To bring an existing project up to date in place,
apply a plan with target ``intree`` and the project as its root.
"""

from __future__ import annotations

from pathlib import Path

from onboard.plan import _checkout, _project, _signals
from onboard.plan._disk import write_error
from onboard.plan.changes import Plan


class Written(tuple[str, ...]):
    """The relative paths that were written.

    Attributes:
        backup: the folder that holds what was made by hand and is no longer in its place; None if nothing had to be
            kept.
    """

    backup: Path | None = None


def apply(plan: Plan, *, force: bool) -> Written:
    """Write the plan.

    Args:
        plan: what to write.
        force: replace what is there. Work of human hands is kept in a backup beside it, never lost.

    Returns:
        The relative paths that were written; in a checkout, files that were the same already are not among them.

    Raises:
        UsageError: something is in the way, has changed since the plan was made, or the disk refuses. Nothing was
            written.
    """
    with _signals.held():
        try:
            paths, backup = (_project if plan.target == "plugin" else _checkout).write(plan, force=force)
        except OSError as error:
            raise write_error(error, plan.root) from error
        written = Written(paths)
        written.backup = backup
    return written


def recover(root: Path) -> tuple[str, ...]:
    """Put right what a killed run left in or beside ``root``: a project folder or a checkout.

    Returns:
        One line for each thing that was done.
    """
    notes: list[str] = []
    with _signals.held():
        try:
            if root.absolute().parent.is_dir():
                notes += _project.recover(root.absolute().parent)
            if root.is_dir():
                notes += _checkout.recover(root)
        except OSError as error:
            raise write_error(error, root) from error
    return tuple(notes)
