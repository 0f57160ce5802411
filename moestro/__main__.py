"""`python -m moestro` is the command `moestro`."""

from __future__ import annotations

import sys

from moestro.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
