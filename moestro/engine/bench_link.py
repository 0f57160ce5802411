"""What this machine's link, memory, disk and launches are.

Owns: these measurements, each a fraction of a second, and the reasons why one could not be made.
Does not own: what an engine makes of the machine. Rates are bytes a second, times seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moestro.engine.bench_disk import DiskFigures, read_disk
from moestro.engine.bench_figures import Link

BLOCK = 64 << 20  # bytes of one copy: from here on the link is at its best
LONG = 1 << 30  # bytes of a copy inside the device, many times its cache
LEAST = 0.2  # seconds that a measurement repeats for
LAUNCHES = 1000


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, or None and the reason in `note`. `unit` is B/s or s."""

    name: str
    value: float | None
    unit: str
    note: str = ""


def measure_link(device: str | None = None) -> Link:
    """The link that experts cross: pinned host memory to the GPU, or on a CPU a copy in memory by
    all threads. `device`: cpu or cuda; None: what this machine has."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        rate = _copy_rate(_pinned(), _on_device())
        torch.cuda.empty_cache()  # an engine that starts next may have all of it
        return Link(rate, "measured, pinned host to device")
    return Link(_memory_rate(), "measured, copy in memory")


def machine_figures(scratch: Path, file: Path | None, size: int) -> list[Figure]:
    """Everything that `moestro bench link` shows. `file` is read, or `size` bytes of a scratch
    file in the folder `scratch`."""
    found = [*_device_figures(), Figure("memory copy", _memory_rate(), "B/s", _threads())]
    return [*found, _disk_figure(read_disk(scratch, file, size))]


def _device_figures() -> list[Figure]:
    return [
        _on_cuda("host to device", "B/s", lambda: _copy_rate(_pinned(), _on_device())),
        _on_cuda("device to host", "B/s", lambda: _copy_rate(_on_device(), _pinned())),
        _on_cuda("device memory copy", "B/s", _device_rate, "read and written bytes"),
        _on_cuda("launch", "s", _launch, "one operation, called from Python"),
        _on_cuda("graph node", "s", _graph_node, "one operation inside a CUDA graph"),
        _on_cuda("round trip", "s", _round_trip, "one operation, its result read by the host"),
    ]


def _on_cuda(name: str, unit: str, measure: Callable[[], float], note: str = "") -> Figure:
    if not torch.cuda.is_available():
        return Figure(name, None, unit, "no CUDA device that torch can use")
    try:
        return Figure(name, measure(), unit, note or torch.cuda.get_device_name())
    except RuntimeError as error:  # out of memory beside a running server, a lost device
        return Figure(name, None, unit, str(error).splitlines()[0])


def _disk_figure(found: DiskFigures) -> Figure:
    return Figure("disk read", found.rate, "B/s", found.note)


def _pinned() -> torch.Tensor:
    return torch.ones(BLOCK, dtype=torch.uint8).pin_memory()


def _on_device() -> torch.Tensor:
    return torch.ones(BLOCK, dtype=torch.uint8, device="cuda")


def _copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes a second of asynchronous copies that follow each other."""

    def several() -> None:
        for _ in range(8):
            target.copy_(source, non_blocking=True)

    return 8 * source.nbytes / _seconds(several, torch.cuda.synchronize)


def _device_rate() -> float:
    source = torch.ones(LONG, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * LONG / _seconds(lambda: target.copy_(source), torch.cuda.synchronize)


def _memory_rate() -> float:
    """Bytes copied a second, by as many threads as torch uses; they are read and written."""
    source = torch.ones(2 * BLOCK, dtype=torch.uint8)
    target = torch.zeros_like(source)  # touched, or the first copy would pay for its pages
    return source.nbytes / _seconds(lambda: target.copy_(source))


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}, bytes copied"


def _launch() -> float:
    x = torch.zeros(1, device="cuda")

    def launches() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return _seconds(launches, torch.cuda.synchronize) / LAUNCHES


def _graph_node() -> float:
    x = torch.zeros(1, device="cuda")
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            x.add_(1)
    return _seconds(graph.replay, torch.cuda.synchronize) / LAUNCHES


def _round_trip() -> float:
    x = torch.zeros(1, device="cuda")
    return _seconds(lambda: x.add_(1).item(), torch.cuda.synchronize)


def _seconds(work: Callable[[], object], settle: Callable[[], object] = lambda: None) -> float:
    """Seconds of one `work()`, the best of several: others may use the machine as well."""
    work()
    settle()
    best, spent = float("inf"), 0.0
    while spent < LEAST:
        began = time.perf_counter()
        work()
        settle()
        took = time.perf_counter() - began
        best, spent = min(best, took), spent + took
    return best
