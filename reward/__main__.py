"""Entry point of `python -m reward`."""

from __future__ import annotations

import sys

from reward.cli import main

if __name__ == "__main__":
    sys.exit(main())
