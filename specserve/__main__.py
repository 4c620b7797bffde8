"""Runs the command `specserve` for `python -m specserve`."""

import sys

from specserve.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
