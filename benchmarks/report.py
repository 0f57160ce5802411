"""How every benchmark says what it found: a small table for people, JSON for machines.

Owns: the flags `--json` and `--work`, and the verdict against a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A number with a limit that it should keep."""

    name: str
    value: float
    limit: float
    unit: str = ""
    at_least: bool = False  # else at most

    @property
    def kept(self) -> bool:
        """Whether the value is on the right side."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser with the flags that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, help="also write the result to this file")
    made.add_argument(
        "--work", type=Path, help="folder for checkpoints and logs, kept (default: a temporary one)"
    )
    return made


@contextmanager
def workplace(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder to work in."""
    if arguments.work is not None:
        arguments.work.mkdir(parents=True, exist_ok=True)
        yield arguments.work
        return
    with tempfile.TemporaryDirectory(prefix="moestro-benchmark-") as folder:
        yield Path(folder)


def spread(values: Sequence[float]) -> str:
    """Median and range, for a table."""
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def finish(
    arguments: argparse.Namespace,
    rows: Sequence[tuple[str, object]],
    bars: Sequence[Bar],
    details: dict[str, Any],
) -> int:
    """Print the table, write the JSON; the exit code is 0 when every bar is kept."""
    width = max(len(name) for name, _ in [*rows, *((bar.name, 0) for bar in bars)])
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        verdict = "ok" if bar.kept else "MISSED"
        limit = f"{sign} {bar.limit:.4g} {bar.unit}"
        print(f"{bar.name:<{width}}  {bar.value:.4g} {bar.unit}  ({limit}: {verdict})")
    if arguments.json is not None:
        result = {
            "machine": {"cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
            "arguments": {k: v for k, v in vars(arguments).items() if k not in ("json", "work")},
            "bars": [asdict(bar) | {"kept": bar.kept} for bar in bars],
            **details,
        }
        arguments.json.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0 if all(bar.kept for bar in bars) else 1
