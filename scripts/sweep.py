"""How broad onboard is: onboards every dense decoder architecture of transformers from its default config.

    python scripts/sweep.py                            the whole scope; the table goes to stdout
    python scripts/sweep.py --page docs/coverage.md    the same, into that page (`make sweep`)
    python scripts/sweep.py llama phi3                 these (`make sweep ARCHS="llama phi3"`)
    python scripts/sweep.py --configs DIR              the config.json files of a folder
    python scripts/sweep.py --list                     what is in scope, and what is not and why

A sweep can be stopped at any time: what is finished is kept in .sweep/ and not run again until the generator, its
templates or the versions change.
"""

from __future__ import annotations

import sys

from breadth.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
