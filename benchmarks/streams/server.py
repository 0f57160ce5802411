"""`moestro` as it is, but for the command that starts its engine process."""

from __future__ import annotations

import functools
import sys

from moestro.engine.handle import EngineHandle
from moestro.server import cli, cli_serve

COMMAND = (sys.executable, "-m", "benchmarks.streams.engine")


def main() -> int:
    """Run the command line with the scripted engine."""
    cli_serve.EngineHandle = functools.partial(EngineHandle, command=COMMAND)  # type: ignore
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
