"""Latency and throughput of an engine in this process.

Owns: the order of a measurement (link, engine, warm-up, runs, floor). Does not own: one batch
(`bench_batch`), the link (`bench_link`), arithmetic (`bench_figures`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moestro.config import Config
from moestro.engine.bench_batch import Clock, drive, measured_floor
from moestro.engine.bench_figures import Link, Load, Measured, estimated_floor, total
from moestro.engine.bench_link import measure_link
from moestro.engine.build import build_engine, device
from moestro.engine.engine import Engine
from moestro.engine.synthetic import Synthetic

Progress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
    pass


def measure(
    config: Config,
    path: Path,
    loads: Sequence[Load],
    synthetic: Synthetic | None = None,
    *,
    link: Link | None = None,
    progress: Progress = _silent,
    clock: Clock = time.perf_counter,
) -> list[Measured]:
    """Every load in turn on one engine over the model in `path`. The link is measured unless
    given, before the engine takes the memory."""
    if link is None:
        progress("the link", 0, 0)
        link = measure_link(device(config))
    engine = build_engine(config, path, progress, synthetic)
    try:
        size = engine.stats().experts.expert_bytes
        engine.finish_fill(lambda done, total: progress("experts", done * size, total * size))
        with _uncollected():
            return [measure_load(engine, load, link, progress, clock) for load in loads]
    finally:
        engine.close()


def measure_load(
    engine: Engine,
    load: Load,
    link: Link,
    progress: Progress = _silent,
    clock: Clock = time.perf_counter,
) -> Measured:
    """The runs of one load on an engine that is idle."""
    for number in range(load.warmup):
        progress(f"batch {load.batch}: warm-up", number, load.warmup)
        drive(engine, load, f"warm-{load.batch}-{number}", clock)
    runs = []
    for number in range(load.repeat):
        progress(f"batch {load.batch}: run", number, load.repeat)
        runs.append(drive(engine, load, f"run-{load.batch}-{number}", clock))
    floor = estimated_floor(total([run.decode for run in runs]))
    if floor is not None:
        progress(f"batch {load.batch}: floor", 0, 0)
        floor = measured_floor(engine, load, clock) or floor
    return Measured(load, tuple(runs), floor, link)


@contextmanager
def _uncollected() -> Iterator[None]:
    """What exists now stays, as in the engine's process: the collector need not walk it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
