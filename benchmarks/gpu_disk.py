"""The disk tier on one GPU: half of the experts in host memory, the rest on disk.

A checkpoint of 12 layers in the shape of Qwen3-30B-A3B is written once; its routers choose among
the even experts only. Three engines with 25 % of the experts in slots decode: all experts in host
memory; half of them, which is what the routers touch; and half of them with uniform made-up
routing, where steps wait for the disk. Bars: the second within 3 % of the first, and the third
reads at 85 % of what O_DIRECT reads reach on the same file.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks import report
from benchmarks.gpu_peers import VOCAB, prompt, slots_for
from benchmarks.gpu_shapes import SHAPES, Shape
from moestro.config import Config
from moestro.engine.bench_disk import read_disk
from moestro.engine.build import build_engine
from moestro.engine.engine import Engine
from moestro.engine.synthetic import Synthetic
from moestro.types import Request, SamplingParams

STREAMS = 8
SETTLE = 200  # decode steps until what is touched has come to host memory


def engine(shape: Shape, path: Path, experts: int, routing: str | None) -> Engine:
    """An engine with host memory for so many experts."""
    config = Config(
        device="cuda",
        expert_slots=slots_for(0.25, shape, STREAMS),
        max_num_seqs=STREAMS,
        kv_cache_tokens=16384,
        max_model_len=4096,
        host_memory=experts * shape.blob,
        enable_prefix_caching=False,
    )
    return build_engine(config, path, synthetic=Synthetic(scramble=True, routing=routing))


def decode(engine: Engine, warm: int, steps: int) -> tuple[float, float]:
    """Seconds of the median step, and bytes a second from disk, after `warm` steps."""
    params = SamplingParams(max_tokens=warm + steps + 20, temperature=0.0)
    for number in range(STREAMS):
        engine.add(Request(f"s{number}", prompt(64, number), params))
    times: list[float] = []
    read = 0
    started = 0.0
    while len(times) < warm + steps:
        began = time.perf_counter()
        if len(engine.step()) < STREAMS:
            continue
        times.append(time.perf_counter() - began)
        if len(times) == warm:
            started, read = time.perf_counter(), engine.stats().experts.disk.bytes_read
    took = time.perf_counter() - started
    read = engine.stats().experts.disk.bytes_read - read
    for number in range(STREAMS):
        engine.abort(f"s{number}")
    while not engine.idle:
        engine.step()
    engine.check()
    return median(times[warm:]), read / took


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    shape = replace(SHAPES["qwen3"], layers=arguments.layers, vocab=VOCAB)
    every = shape.layers * shape.experts
    with report.workplace(arguments) as work:
        path = work / "checkpoint"
        if not (path / "model.safetensors.index.json").exists():
            shape.write_checkpoint(path, "cuda", half=True)
            torch.cuda.empty_cache()
            os.sync()
        disk = read_disk(work, path / "layer-1.safetensors", 1 << 30)
        assert disk.rate is not None, disk.note
        print(f"O_DIRECT {disk.rate / 1e9:.2f} GB/s", flush=True)
        found: dict[str, tuple[float, float]] = {}
        for name, experts, routing, warm, steps in (
            ("all in host memory", every, None, SETTLE, 60),
            ("half in host memory, touched ones", every // 2, None, SETTLE, 60),
            ("half in host memory, uniform routing", every // 2, "uniform", 4, 16),
        ):
            began = time.perf_counter()
            one = engine(shape, path, experts, routing)
            ready = time.perf_counter() - began
            one.finish_fill()
            print(f"ready {ready:.1f} s, full {time.perf_counter() - began:.1f} s", flush=True)
            found[name] = decode(one, warm, steps)
            one.close()
            print(name, found[name], flush=True)
            del one
            torch.cuda.empty_cache()
    whole, touched, missing = found.values()
    rows = [
        (name, f"step {1e3 * step:.2f} ms, {rate / 1e9:.3f} GB/s from disk")
        for name, (step, rate) in found.items()
    ]
    bars = [
        report.Bar("touched in host memory, step over all in it", touched[0] / whole[0], 1.03, "x"),
        report.Bar("disk while missing, of O_DIRECT", missing[1] / disk.rate, 0.85, "x", True),
    ]
    return report.finish(arguments, rows, bars, {"disk": disk.rate})


if __name__ == "__main__":
    sys.exit(main())
