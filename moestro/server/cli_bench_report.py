"""The result of a benchmark as plain data, for JSON.

Owns: the names of what is reported. Times are seconds, sizes bytes, rates a second. Does not own:
the numbers (`engine.bench_figures`) or the table (`cli_bench_show`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moestro.config import SECRET, Config
from moestro.engine.bench_figures import Bound, Counts, Measured, Phase, bound, spread, total
from moestro.errors import ConfigError
from moestro.server.cli_bench_flags import STDOUT
from moestro.server.cli_check import machine

SCHEMA = 1  # of the JSON; goes up when a name changes its meaning


def head(kind: str, config: Config | None = None) -> dict[str, Any]:
    """What every result begins with: the kind, the machine, the time, the settings."""
    found: dict[str, Any] = {
        "bench": kind,
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    if config is not None:
        settings = config.model_dump(mode="json", exclude_unset=True, exclude=set(SECRET))
        found["settings"] = settings
    return found


def measured_json(measured: Measured) -> dict[str, Any]:
    """One load with its runs taken together."""
    runs = measured.runs
    prefill = total([run.prefill for run in runs])
    decode = total([run.decode for run in runs])
    first = [seconds for run in runs for seconds in run.first]
    gaps = [seconds for run in runs for seconds in run.gaps]
    return {
        **asdict(measured.load),
        "prefill": phase_json(prefill) | {"time_to_first_token": spread(first)},
        "decode": phase_json(decode) | {"gap": spread(gaps)},
        "bound": bound_json(bound(decode, measured.floor, measured.link)),
    }


def phase_json(phase: Phase) -> dict[str, Any]:
    """Speed of a phase and what it moved."""
    return {
        "seconds": phase.seconds,
        "tokens": phase.tokens,
        "tokens_per_second": phase.tokens / phase.seconds if phase.seconds > 0 else 0.0,
        "steps": phase.steps,
        "step_seconds": phase.seconds / phase.steps if phase.steps else 0.0,
        "cache": counts_json(phase.counts),
    }


def counts_json(counts: Counts) -> dict[str, Any]:
    """Hits and misses by tier, bytes moved and exposed seconds."""
    wanted = counts.hits + counts.misses
    return {
        "slot_hits": counts.hits,
        "misses": counts.misses,
        "miss_share": counts.misses / wanted if wanted else 0.0,
        "from_host": counts.from_host,
        "from_disk": counts.from_disk,
        "staged": counts.staged,
        "host_bytes": counts.host_bytes,
        "disk_bytes": counts.disk_bytes,
        "exposed_seconds": counts.exposed,
    }


def bound_json(found: Bound | None) -> dict[str, Any] | None:
    """floor + bytes / link of a mean decode step, and how close it came."""
    if found is None:
        return None
    return {
        "step_seconds": found.step,
        "floor_seconds": found.floor.seconds,
        "floor_measured": found.floor.measured,
        "floor_steps": found.floor.steps,
        "bytes_per_step": found.bytes,
        "link_bytes_per_second": found.link.rate,
        "link_source": found.link.source,
        "bound_seconds": found.seconds,
        "share": found.share,
    }


def put_json(result: Mapping[str, Any], where: Path | None) -> None:
    """Write the result to a file, to standard output for `-`, or nowhere."""
    if where is None:
        return
    text = json.dumps(result, indent=1)
    if where == STDOUT:
        print(text)
        return
    try:
        where.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {where}: {error.strerror}", param="json") from None
