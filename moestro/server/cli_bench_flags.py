"""The flags of `moestro bench`: how their values are spelled, and those that kinds share.

Owns: the words of a benchmark's command line and what is refused of them. Does not own: the
engine's settings (`cli_flags`), or limits that only a model knows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moestro.config_values import parse_size
from moestro.errors import ConfigError
from moestro.server.cli_flags import Parser, config_parser, flag_of

# Settings of the HTTP side: a benchmark without a server would accept and ignore them.
OF_THE_SERVER = frozenset(
    {
        "served_model_name",
        "accept_any_model",
        "chat_template",
        "chat_template_kwargs",
        "host",
        "port",
        "api_key",
        "api_key_file",
        "rate_limit",
        "allow_unauthenticated",
        "cors_origins",
        "docs",
        "max_request_body",
        "request_timeout",
        "send_timeout",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_keyfile_password",
        "sse_keep_alive_interval",
        "shutdown_timeout",
        "metrics_prefix",
        "log_requests",
    }
)

STDOUT = Path("-")


def engine_parser(kind: str, description: str) -> Parser:
    """The engine's settings, and what a benchmark of an engine takes beside them."""
    parser = config_parser(f"moestro bench {kind}", description)
    _add(parser, "--input-len", _count, "N", "tokens of each prompt (64)")
    _add(parser, "--output-len", _count, "N", "tokens generated for each prompt (128)")
    _add(parser, "--repeat", _count, "N", "batches that count")
    _add(parser, "--warmup", _whole, "N", "batches before them that do not (1)")
    text = "routing of decode steps: uniform, zipf:A or replay:TRACE (the model's own routers)"
    _add(parser, "--routing", str, "LAW", text)
    _add(parser, "--keep", _share, "P", "how likely a row keeps an expert of its last step (0)")
    parser.add_argument(
        "--scramble",
        action=argparse.BooleanOptionalAction,
        help="replace each token by a scrambled one, so that a random model does not run in "
        "circles (on with --load-format dummy)",
    )
    add_link(parser)
    add_json(parser)
    return parser


def add_batch(parser: Parser) -> None:
    """The batch of `latency`."""
    _add(parser, "--batch", _count, "N", "sequences at the same time (1)")


def add_batch_sizes(parser: Parser) -> None:
    """The batches of `throughput`."""
    _add(parser, "--batch-sizes", _counts, "N,N,...", "sequences at the same time (1,4,16,64)")


def add_link(parser: Parser) -> None:
    """The rate that bounds are computed with."""
    _add(parser, "--link-gbps", _positive, "GB/s", "rate of the link, 10^9 bytes/s (measured)")


def add_json(parser: Parser) -> None:
    """Where the machine-readable result goes."""
    _add(parser, "--json", Path, "FILE", "also write the result as JSON; - is standard output")


def check_json(path: Path | None) -> None:
    """ConfigError when the result could not be written there: better now than after the run."""
    if path is not None and path != STDOUT and not path.absolute().parent.is_dir():
        raise ConfigError(f"no directory {path.parent} for the result", param="json")


def link_parser() -> Parser:
    """The flags of `bench link`."""
    parser = plain_parser("link", "Measure this machine's link, memory, disk and launches.")
    _add(parser, "--file", Path, "FILE", "read this file to measure the disk")
    _add(parser, "--dir", Path, "DIR", "folder of a scratch file (the system's temporary one)")
    _add(parser, "--size", _size, "SIZE", "most bytes to read from the disk (1GiB)")
    add_json(parser)
    return parser


def serve_parser() -> Parser:
    """The flags of `bench serve`."""
    parser = plain_parser("serve", "Drive a running server and time what it answers.")
    _add(parser, "--base-url", str, "URL", "the server (http://127.0.0.1:8000)")
    _add(parser, "--api-key", str, "KEY", "key to send (MOESTRO_API_KEY)")
    _add(parser, "--model", str, "NAME", "name of the model (the first that the server lists)")
    _add(parser, "--num-prompts", _count, "N", "requests (32, or all of the data set)")
    _add(parser, "--request-rate", _positive, "R", "requests a second, at random (Poisson)")
    _add(parser, "--concurrency", _count, "N", "requests at the same time (1)")
    _add(parser, "--input-len", _count, "N", "random tokens of each prompt (64)")
    _add(parser, "--output-len", _count, "N", "most tokens of each answer (128)")
    _add(parser, "--shared-prefix", _count, "N", "tokens before those, the same in all prompts")
    text = 'file with a {"prompt": ...} or {"messages": ...} on each line, in place of random ones'
    _add(parser, "--dataset", Path, "FILE.jsonl", text)
    _add(parser, "--vocab", _count, "N", "random tokens are below this (as the server says)")
    _add(parser, "--seed", _whole, "N", "seed of prompts and arrivals (0)")
    add_link(parser)
    add_json(parser)
    return parser


def plain_parser(kind: str, description: str) -> Parser:
    """A parser that knows only of what is given, and has no flag yet."""
    return Parser(
        prog=f"moestro bench {kind}",
        usage=f"moestro bench {kind} [flags]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )


def only_flags(parser: Parser, words: Sequence[str]) -> dict[str, Any]:
    """Values by name. Raises ConfigError for a word that is no flag."""
    values, rest = parser.parse_strictly(words)
    if rest:
        raise ConfigError(f"{parser.prog} takes flags only, not {rest[0]}", param=rest[0])
    return values


def refuse_server_flags(values: dict[str, Any]) -> None:
    """ConfigError for a setting that no benchmark in this process could honour."""
    for name in values:
        if name in OF_THE_SERVER:
            flag = flag_of(name)
            raise ConfigError(f"{flag} is a setting of moestro serve, not of bench", param=name)


def _add(parser: Parser, flag: str, kind: Any, metavar: str, text: str) -> None:
    parser.add_argument(flag, type=kind, metavar=metavar, help=text.replace("%", "%%"))


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} should be a count")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be a count, at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part.strip()) for part in text.split(","))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} should be a number")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be more than 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be from 0 to 1")
    return value


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} should be {error}") from None
    if not isinstance(size, int) or size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be more than 0")
    return size
