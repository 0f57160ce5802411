"""`moestro simulate`: replays a trace against policies and sizes, and prints how they did.

Owns: what the verb accepts and prints. `replay` does the counting. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moestro.errors import ConfigError
from moestro.expert_cache.rebatch import rebatch
from moestro.expert_cache.replay import BELADY, NAMES, Recording, Report, Steps, replay
from moestro.expert_cache.trace import read_trace

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Report", "main", "replay", "table"]


def table(reports: Iterable[Report]) -> Table:
    """Reports as text: one row each, best first among equal sizes."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # Narrow: eight columns must fit a terminal of 80.
    out = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in ("slots", "of all", "policy", "hits", "in decode", "misses", "GB", "exposed s"):
        out.add_column(name, justify="right", no_wrap=True)
    for report in sorted(reports, key=lambda report: (report.slots, -report.hit_rate)):
        out.add_row(
            str(report.slots),
            f"{report.slots / report.experts:.0%}",
            "belady (bound)" if report.policy == BELADY else report.policy,
            f"{report.hit_rate:.1%}",
            f"{report.decode_hit_rate:.1%}",
            str(report.misses),
            f"{report.bytes / 1e9:.2f}" if report.bytes or not report.misses else "?",
            f"{report.exposed_seconds:.2f}" if report.bytes or not report.misses else "?",
        )
    return out


def main(
    trace: Path,
    policies: list[str],
    slots: list[str],
    link: float,
    as_json: bool,
    *,
    batch: int | None = None,
    expert_bytes: int | None = None,
) -> int:
    """`moestro simulate`: print a table (or JSON) of every policy at every size; returns 0.

    `policies` are names or `all`, `slots` counts or percentages of all experts, `link` is in
    bytes a second. `expert_bytes` replaces what the trace says.
    """
    from rich.console import Console

    recording: Recording = read_trace(trace)
    head = recording.header
    names = _names(policies)
    sizes = [_parse_slots(text, head.layers * head.experts) for text in slots]
    size = head.expert_bytes if expert_bytes is None else expert_bytes
    if batch is not None:
        recording = Steps(head, list(rebatch(recording, batch)))
    reports = [
        replace(
            replay(recording, name, count, link_bytes_per_second=link, expert_bytes=size),
            batch=batch,
        )
        for count in sizes
        for name in names
    ]
    if as_json:
        rates = ({**asdict(report), "hit_rate": report.hit_rate} for report in reports)
        print(msgspec.json.format(msgspec.json.encode(list(rates))).decode())
        return 0
    console = Console()
    console.print(f"{head.model}: {head.layers} layers of {head.experts} experts, top {head.top_k}")
    console.print(table(reports))
    if not size:
        console.print("The trace does not say how large an expert is: bytes and times are unknown.")
    return 0


def _names(policies: list[str]) -> tuple[str, ...]:
    if "all" in policies:
        return NAMES
    for name in policies:
        if name not in NAMES:
            raise ConfigError(
                f"no expert policy {name!r}, only {', '.join(NAMES)}, or all", param="--policy"
            )
    return tuple(policies)


def _parse_slots(text: str, everything: int) -> int:
    number = text.strip().removesuffix("%")
    try:
        count = int(everything * float(number) / 100) if "%" in text else int(number)
    except ValueError as error:
        raise ConfigError(
            f"slots {text!r} is neither a count nor a percentage", param="--slots"
        ) from error
    if count < 0:
        raise ConfigError(f"slots {text!r} is less than 0", param="--slots")
    return min(count, everything)
