"""What the commands print: sizes, the memory plan, loading progress.

Owns: wording and layout for a person at a terminal or a reader of a log. Computes nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

TICK = 0.1  # seconds between two looks at the progress

Progress = tuple[str, int, int]  # stage, bytes done, bytes in all


def show_size(count: int) -> str:
    """`count` bytes as a person reads them: `512 B`, `15.5 MiB`, `24.0 GiB`."""
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def memory_table(memory: Mapping[str, int], notes: Iterable[str] = ()) -> str:
    """Names and sizes in two columns, then the notes, one a line."""
    names = [name.replace("_", " ") for name in memory]
    width = max(map(len, names), default=0)
    rows = [
        f"  {n:<{width}}  {show_size(b):>10}" for n, b in zip(names, memory.values(), strict=True)
    ]
    return "\n".join(["Memory", *rows, *(f"  note: {note}" for note in notes)])


COUNTED = frozenset({"decode graphs", "sweep kernels"})  # stages that are not measured in bytes


def _amount(stage: str, number: int) -> str:
    return str(number) if stage in COUNTED else show_size(number)


async def show_loading(progress: Callable[[], Progress], out: TextIO | None = None) -> None:
    """Show `progress()` until cancelled: as a bar on a terminal, else as a line per tenth."""
    out = out or sys.stderr
    show = _show_bar if out.isatty() else _show_lines
    await show(progress, out)


async def _show_lines(progress: Callable[[], Progress], out: TextIO) -> None:
    shown: tuple[str, int] | None = None
    while True:
        stage, done, total = progress()
        tenths = 10 * done // total if total else 0
        if stage and (stage, tenths) != shown:
            shown = (stage, tenths)
            amount = f": {10 * tenths}% of {_amount(stage, total)}" if total > 1 else ""
            print(f"{stage}{amount}", file=out, flush=True)
        await asyncio.sleep(TICK)


async def _show_bar(progress: Callable[[], Progress], out: TextIO) -> None:
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TextColumn("{task.fields[amount]}"),
    )
    with rich.Progress(*columns, console=Console(file=out), transient=True) as bar:
        task = bar.add_task("starting", total=None, amount="")
        while True:
            stage, done, total = progress()
            known = total > 1  # else the stage has no size
            bar.update(
                task,
                description=stage or "starting",
                completed=done,
                total=total if known else None,
                amount=f"{_amount(stage, done)} of {_amount(stage, total)}" if known else "",
            )
            await asyncio.sleep(TICK)
