"""The table that `moestro bench serve` prints. Owns: its wording and layout; computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from moestro.server.cli_bench_show import (
    moved_cell,
    rate,
    seconds,
    show_table,
    spread_cell,
    tiers_cell,
)

Rows = list[tuple[str, list[str]]]


def show_served(result: Mapping[str, Any], to: TextIO) -> None:
    """Clients' times, the engine's counters, the bound."""
    load = result["load"]
    pace = f"{load['concurrency']} at a time"
    if load["request_rate"] is not None:
        pace = f"{load['request_rate']:g} a second (Poisson)"
    title = (
        f"moestro bench serve: {result['model']}, {load['requests']} requests "
        f"({load['prompts']}), {pace}"
    )
    rows = [*_clients(result), *_engine(result["engine"]), *_bound(result["bound"])]
    show_table(title, [""], rows, _notes(result), to)


def _clients(result: Mapping[str, Any]) -> Rows:
    prefill, decode = result["prefill"], result["decode"]
    return [
        ("Prefill", []),
        ("  first token p50 / p90 / p99", [spread_cell(prefill["time_to_first_token"])]),
        ("  prompt tokens/s", [f"{prefill['tokens_per_second']:.5g}"]),
        ("Decode", []),
        ("  token gap p50 / p90 / p99", [spread_cell(decode["gap"])]),
        ("  tokens/s", [f"{decode['tokens_per_second']:.5g}"]),
        ("All", []),
        ("  seconds", [f"{result['seconds']:.4g}"]),
        ("  requests/s", [f"{result['requests_per_second']:.4g}"]),
        ("  failed", [str(result["failed"])]),
    ]


def _engine(engine: Mapping[str, Any] | None) -> Rows:
    if engine is None:
        return []
    cache = engine["cache"]
    return [
        ("Engine", []),
        ("  sweeps / decode steps", [f"{engine['sweeps']} / {engine['decode_steps']}"]),
        ("  swept / reused tokens", [f"{engine['swept_tokens']} / {engine['prefix_hit_tokens']}"]),
        ("  hits slot / host / disk", [tiers_cell(cache)]),
        ("  misses", [f"{cache['miss_share']:.1%}"]),
        ("  bytes host / disk", [moved_cell(cache)]),
        ("  exposed fetch", [seconds(cache["exposed_seconds"])]),
    ]


def _bound(found: Mapping[str, Any] | None) -> Rows:
    if found is None:
        return []
    return [
        ("Bound of the whole run", []),
        ("  floor", [f"~ {seconds(found['floor_seconds'])}"]),
        ("  link", [rate(found["link_bytes_per_second"])]),
        ("  floor + bytes / link", [seconds(found["bound_seconds"])]),
        ("  share reached", [f"{found['share']:.1%}"]),
    ]


def _notes(result: Mapping[str, Any]) -> list[str]:
    notes = []
    if result["first_error"] is not None:
        notes.append(f"{result['failed']} failed; the first: {result['first_error']}")
    if result["engine"] is None:
        notes.append("the server has no /admin/stats: hits, bytes and the bound are not known")
    elif result["bound"] is None:
        notes.append("the server is on another machine: give --link-gbps for the bound")
    else:
        notes.append(
            "counters are those of sweeps and decode steps together, of all clients; floor ~: the "
            f"run less its exposed time, idle time included; link: {result['bound']['link_source']}"
        )
    return notes
