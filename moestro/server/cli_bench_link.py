"""`moestro bench link`: what this machine's link, memory, disk and launches are.

Owns: its flags and its table. Does not own: the measurements (`engine.bench_link`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moestro.errors import ConfigError
from moestro.server.cli_bench_flags import STDOUT, check_json, link_parser, only_flags
from moestro.server.cli_bench_report import head, put_json
from moestro.server.cli_bench_show import rate, seconds, show_table

SIZE = 1 << 30  # bytes


def link_command(words: Sequence[str]) -> Callable[[], int]:
    """The measurement that `words` ask for. Raises ConfigError."""
    values = only_flags(link_parser(), words)
    file, folder = values.get("file"), values.get("dir")
    if file is not None and folder is not None:
        raise ConfigError("--file and --dir: one or the other is read", param="dir")
    if file is not None and not file.is_file():
        raise ConfigError(f"no file {file}", param="file")
    folder = folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise ConfigError(f"no directory {folder}", param="dir")
    check_json(values.get("json"))
    return lambda: _run(file, folder, values.get("size", SIZE), values.get("json"))


def _run(file: Path | None, folder: Path, size: int, json: Path | None) -> int:
    from moestro.engine.bench_link import machine_figures

    result = head("link")
    figures = [asdict(figure) for figure in machine_figures(folder, file, size)]
    result["results"] = figures
    rows = [(one["name"], [_value(one), one["note"]]) for one in figures]
    out = sys.stderr if json == STDOUT else sys.stdout
    show_table("moestro bench link", ["", "of"], rows, [], out)
    put_json(result, json)
    return 0


def _value(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return "not measured"
    show = {"B/s": rate, "s": seconds}[figure["unit"]]
    return show(figure["value"])
