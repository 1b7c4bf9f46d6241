"""The command line: one file a command, which parses, calls and prints.

What is shared starts with an underscore: :mod:`._group` (the commands and their common options), :mod:`._run` (exit
statuses), :mod:`._output` and :mod:`._progress` (what is printed where). Until a command runs, nothing but click and
the standard library is imported.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line on ``sys.argv`` and exit."""
    from onboard.cli._group import root

    sys.exit(root.main())
