"""`moestro bench`: which benchmark runs.

Owns: the kinds of benchmark. Does not own: their flags or what they do (`cli_bench_engine`,
`cli_bench_serve`, `cli_bench_link`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moestro.config import nearest
from moestro.errors import ConfigError
from moestro.server.cli_bench_engine import latency_command, throughput_command
from moestro.server.cli_bench_link import link_command
from moestro.server.cli_bench_serve import serve_command

Command = Callable[[], int]

USAGE = """\
usage: moestro bench KIND [...]

  latency [MODEL] [flags]     time to the first token and between tokens, of one batch
  throughput [MODEL] [flags]  tokens a second over batch sizes
  serve [flags]               the same through a running server, at a request rate or concurrency
  link [flags]                what this machine's link, memory, disk and launches are

moestro bench KIND --help lists the flags of a kind."""


def bench_command(words: Sequence[str]) -> Command:
    """The benchmark that `words` ask for, ready to run. Raises ConfigError."""
    if words and words[0] in {"-h", "--help", "help"}:
        return _help
    if not words or words[0].startswith("-"):
        raise ConfigError(f"bench needs a kind: {', '.join(KINDS)}; moestro bench --help")
    if words[0] not in KINDS:
        hint = nearest(words[0], KINDS)
        raise ConfigError(f"unknown benchmark {words[0]}{hint}; moestro bench --help lists them")
    return KINDS[words[0]](words[1:])


def _help() -> int:
    print(USAGE)
    return 0


KINDS: dict[str, Callable[[Sequence[str]], Command]] = {
    "latency": latency_command,
    "throughput": throughput_command,
    "serve": serve_command,
    "link": link_command,
}
