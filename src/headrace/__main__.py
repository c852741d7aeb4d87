"""`python -m headrace`: the same command line as the `headrace` script."""

from __future__ import annotations

import sys

from headrace.cli import main

if __name__ == "__main__":
    sys.exit(main())
