"""The tables that `moestro bench` prints.

Owns: wording and layout of a result for a person. Computes nothing: all numbers are in the result
as `cli_bench_report` made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moestro.server.cli_show import show_size

Cell = Callable[[Mapping[str, Any]], str]
NARROWEST = 100  # columns when the output is no terminal


def show_measured(result: Mapping[str, Any], to: TextIO) -> None:
    """The table of `latency` and `throughput`: a column for each batch size."""
    results: Sequence[Mapping[str, Any]] = result["results"]
    columns = [f"batch {one['batch']}" for one in results]
    rows: list[tuple[str, Sequence[str]]] = []
    for title, cells in MEASURED:
        rows.append((title, ()))
        rows += [(f"  {name}", [cell(one) for one in results]) for name, cell in cells]
    one = results[0]
    title = (
        f"moestro bench {result['bench']}: {result['model']}, "
        f"prompts of {one['input_len']} tokens, {one['output_len']} new, "
        f"{result['slots']} slots for {result['experts']} experts"
    )
    show_table(title, columns, rows, [*made_up(result["synthetic"]), *_notes(results)], to)


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str]]],
    notes: Sequence[str],
    to: TextIO,
) -> None:
    """Title, table and notes. A row without cells is a heading."""
    console = Console(file=to, highlight=False, width=None if to.isatty() else _width(columns))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for name, cells in rows:
        table.add_row(Text(name, "" if cells else "bold"), *(Text(cell) for cell in cells))
    console.print(Text(title, "bold"), soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(Text(note), soft_wrap=True)


def made_up(synthetic: Mapping[str, Any]) -> list[str]:
    """What of a run was not the model's own."""
    notes = []
    if synthetic["routing"] is not None:
        keep = f", keep {synthetic['keep']:g}" if synthetic["keep"] else ""
        notes.append(
            f"ROUTING OVERRIDDEN: decode steps are routed by {synthetic['routing']}{keep}, "
            f"seed {synthetic['seed']}; sweeps by the model's routers"
        )
    if synthetic["scramble"]:
        notes.append("token ids are scrambled: the text means nothing")
    return notes


def _width(columns: Sequence[str]) -> int:
    return max(NARROWEST, 32 + 24 * len(columns))


def _notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    bounds = [one["bound"] for one in results if one["bound"] is not None]
    if bounds:
        source = bounds[0]["link_source"]
        notes.append(f"bound = floor + bytes / link, of the mean decode step; link: {source}")
    if any(not found["floor_measured"] for found in bounds):
        notes.append("floor ~: no step was free of misses; it is the step less its exposed time")
    if any(one["decode"]["cache"]["disk_bytes"] for one in results):
        notes.append("some experts came from disk: the bound counts only what crossed the link")
    return notes


def seconds(value: float) -> str:
    """A time as a person reads it."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= factor or unit == "us":
            return f"{value / factor:.4g} {unit}"
    raise AssertionError(value)


def spread_cell(spread: Mapping[str, float]) -> str:
    """p50 / p90 / p99 in milliseconds."""
    return " / ".join(f"{spread[name] * 1e3:.4g}" for name in ("p50", "p90", "p99")) + " ms"


def rate(value: float) -> str:
    """Bytes a second in the unit that links are sold by."""
    return f"{value / 1e9:.4g} GB/s"


def tiers_cell(cache: Mapping[str, Any]) -> str:
    """Uses from slots / host / disk."""
    return f"{cache['slot_hits']} / {cache['from_host']} / {cache['from_disk']}"


def moved_cell(cache: Mapping[str, Any]) -> str:
    """Bytes from host / disk."""
    return f"{show_size(cache['host_bytes'])} / {show_size(cache['disk_bytes'])}"


def _phase(name: str) -> list[tuple[str, Cell]]:
    return [
        ("tokens/s", lambda one: f"{one[name]['tokens_per_second']:.5g}"),
        ("hits slot / host / disk", lambda one: tiers_cell(one[name]["cache"])),
        ("misses", lambda one: f"{one[name]['cache']['miss_share']:.1%}"),
        ("bytes host / disk", lambda one: moved_cell(one[name]["cache"])),
        ("exposed fetch", lambda one: _exposed(one[name])),
    ]


def _exposed(phase: Mapping[str, Any]) -> str:
    exposed: float = phase["cache"]["exposed_seconds"]
    share = exposed / phase["seconds"] if phase["seconds"] else 0.0
    return f"{seconds(exposed)} ({share:.1%})"


def _of_bound(show: Cell) -> Cell:
    return lambda one: "-" if one["bound"] is None else show(one["bound"])


def _floor(found: Mapping[str, Any]) -> str:
    return ("" if found["floor_measured"] else "~ ") + seconds(found["floor_seconds"])


MEASURED: tuple[tuple[str, list[tuple[str, Cell]]], ...] = (
    (
        "Prefill",
        [
            (
                "first token p50 / p90 / p99",
                lambda one: spread_cell(one["prefill"]["time_to_first_token"]),
            ),
            *_phase("prefill"),
        ],
    ),
    (
        "Decode",
        [
            ("token gap p50 / p90 / p99", lambda one: spread_cell(one["decode"]["gap"])),
            *_phase("decode"),
        ],
    ),
    (
        "Bound of a decode step",
        [
            ("mean step", _of_bound(lambda found: seconds(found["step_seconds"]))),
            ("floor", _of_bound(_floor)),
            ("bytes", _of_bound(lambda found: show_size(int(found["bytes_per_step"])))),
            ("link", _of_bound(lambda found: rate(found["link_bytes_per_second"]))),
            ("floor + bytes / link", _of_bound(lambda found: seconds(found["bound_seconds"]))),
            ("share reached", _of_bound(lambda found: f"{found['share']:.1%}")),
        ],
    ),
)
