"""The command `moestro`: its verbs, its exit codes.

Owns: which verb runs and how an error ends it. 0: done; 1: it failed; 2: the command line, the
environment or the config file is wrong. Does not own what a verb does (`cli_serve`, `cli_check`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from moestro import __version__
from moestro.config import load, nearest
from moestro.errors import ConfigError, MoestroError
from moestro.server.cli_flags import config_flags, config_parser

Command = Callable[[], int]

USAGE = """\
usage: moestro VERB [...]

  serve [MODEL] [flags]   answer the OpenAI API on a port; without a model: the demo
  check [MODEL] [flags]   report the machine, the memory plan and the kernels
  simulate TRACE [flags]  replay recorded expert routing against cache policies
  bench KIND [flags]      measure latency, throughput, a running server or this machine's link

moestro VERB --help lists the flags of a verb; moestro --version prints the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        command = _parse(words)
    except ConfigError as error:
        return _complain(error, 2)
    try:
        return command()
    except MoestroError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130


def _complain(error: MoestroError, code: int) -> int:
    print(f"moestro: {error.message}", file=sys.stderr)
    return code


def _parse(words: Sequence[str]) -> Command:
    if not words or words[0] in {"-h", "--help", "help"}:
        text, code = USAGE, 0 if words else 2
        return lambda: _print(text, code)
    if words[0] in {"--version", "version"}:
        return lambda: _print(f"moestro {__version__}", 0)
    if words[0] not in VERBS:
        hint = nearest(words[0], VERBS)
        raise ConfigError(f"unknown verb {words[0]}{hint}; moestro --help lists them")
    return VERBS[words[0]](words[1:])


def _print(text: str, code: int) -> int:
    print(text, file=sys.stdout if code == 0 else sys.stderr)
    return code


def _serve(words: Sequence[str]) -> Command:
    from moestro.server.cli_serve import serve
    from moestro.server.doors import check_doors

    parser = config_parser("moestro serve", "Answer the OpenAI API for one model.")
    config = load(config_flags(parser, words))
    check_doors(config)
    return lambda: serve(config)


def _check(words: Sequence[str]) -> Command:
    from moestro.server.cli_check import check

    parser = config_parser("moestro check", "Report the machine, the memory plan, the kernels.")
    config = load(config_flags(parser, words))
    return lambda: check(config)


def _simulate(words: Sequence[str]) -> Command:
    from moestro.server.cli_simulate import simulate_command

    return simulate_command(words)


def _bench(words: Sequence[str]) -> Command:
    from moestro.server.cli_bench import bench_command

    return bench_command(words)


VERBS: dict[str, Callable[[Sequence[str]], Command]] = {
    "serve": _serve,
    "check": _check,
    "simulate": _simulate,
    "bench": _bench,
}
