"""`moestro simulate`: the flags of the trace replay. `expert_cache.simulate` does the work."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moestro.config_values import parse_size
from moestro.errors import ConfigError
from moestro.server.cli_flags import Parser

SLOTS = ("5%", "10%", "25%", "50%", "75%")
LINK = "25GB"  # about what sixteen lanes of PCIe 4 carry in a second


def simulate_command(words: Sequence[str]) -> Callable[[], int]:
    """The replay that `words` ask for, ready to run. Raises ConfigError."""
    from moestro.expert_cache.replay import NAMES
    from moestro.expert_cache.simulate import main

    values, traces = _parser(NAMES).parse_strictly(words)
    if len(traces) != 1:
        raise ConfigError(f"simulate takes one trace file, not {len(traces)}", param="TRACE")
    trace = Path(traces[0])
    if not trace.is_file():
        raise ConfigError(f"no trace file {trace}", param="TRACE")
    return lambda: main(
        trace,
        values.get("policy", ["all"]),
        values.get("slots", list(SLOTS)),
        values["link"],
        values["json"],
        batch=values["batch"],
        expert_bytes=values["expert_size"],
    )


def _parser(policies: Sequence[str]) -> Parser:
    parser = Parser(
        prog="moestro simulate",
        usage="moestro simulate TRACE [flags]",
        description="Replay recorded expert routing (moestro serve --trace TRACE) against cache "
        "policies and sizes, and print hit rates and the time that fetching would have cost.",
        allow_abbrev=False,
    )
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": argparse.SUPPRESS}
    parser.add_argument(
        "--policy",
        choices=(*policies, "all"),
        metavar="NAME",
        help=f"policies to replay: {', '.join(policies)}, or all (all)",
        **several,
    )
    parser.add_argument(
        "--slots",
        type=_slots,
        metavar="N",
        help=f"expert slots, as counts or percentages of all experts ({' '.join(SLOTS)})".replace(
            "%", "%%"
        ),
        **several,
    )
    parser.add_argument(
        "--batch",
        type=_count,
        metavar="N",
        help="regroup the recorded sequences into steps of N (as recorded)",
    )
    parser.add_argument(
        "--link",
        type=_size,
        default=_size(LINK),
        metavar="SIZE",
        help=f"bytes that cross to the device in a second ({LINK})",
    )
    parser.add_argument(
        "--expert-size",
        type=_size,
        metavar="SIZE",
        help="bytes of one expert (as the trace says)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} should be {error}") from None
    if not isinstance(size, int) or size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be more than 0")
    return size


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be a count, at least 1")
    return int(text)


def _slots(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?%|\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} should be a count or a percentage such as 25%")
    return text
