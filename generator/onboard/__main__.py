"""``python -m onboard``."""

from onboard.cli import main

main()
