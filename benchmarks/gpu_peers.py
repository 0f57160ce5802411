"""Tokens a second on one GPU in the shape that peers were measured in, at parts of the experts.

The shape of Qwen3-30B-A3B cut to 12 layers (vocabulary 32,000, bf16, 15.2 GB; --shape, --layers
and --vocab change it), random weights, prompts of 64 tokens, greedy tokens scrambled. Resident are
the experts in slots that are kept: ring and staging come on top. The engine runs in this process.
Prompts are computed first, then decode steps are timed: median and mean step, and what each
fetched. Beside them stand two bounds: what the memory needs for the bytes that a step touches, and
the floor (the step with all resident) plus the fetched bytes over the link. --busy says how much
of the time the GPU worked.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from benchmarks.gpu_shapes import SHAPES, Shape
from moestro.config import Config
from moestro.engine.build import build_engine
from moestro.engine.engine import Engine
from moestro.engine.synthetic import Synthetic
from moestro.types import Request, SamplingParams, TokenEvent

VOCAB = 32_000
MEMORY = 4.18e12  # bytes a second, read and written, of a copy on the device (`moestro bench link`)
LINK = 54.9  # GB/s, page-locked host memory to the device (the same)


def slots_for(resident: float, shape: Shape, rows: int) -> int:
    """Slots in all so that this part of the experts is kept beside ring and staging."""
    every = shape.layers * shape.experts
    kept = int(every * resident)
    if kept >= every:
        return every
    staging = min(24, 3 * shape.experts)
    ring = min(shape.experts, rows * shape.top_k, kept // 5)
    return kept + staging + ring


def prompt(count: int, seed: int) -> tuple[int, ...]:
    """Random tokens."""
    draw = random.Random(seed)
    return tuple(draw.randrange(3, VOCAB) for _ in range(count))


def busy(engine: Engine, steps: int) -> float:
    """Part of the time in which the GPU ran something, over some decode steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    worked, end = 0.0, spans[0][0]
    for start, stop in spans:
        worked += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return worked / (end - spans[0][0])


def stranger(engine: Engine, tokens: int, streams: int) -> str:
    """A long prompt arrives while streams decode: the largest gap, and the sweep's speed."""
    alone, _ = sweep(engine, tokens, 90)
    alone, _ = sweep(engine, tokens, 91)
    params = SamplingParams(max_tokens=4000, temperature=0.0)
    for number in range(streams):
        engine.add(Request(f"live-{number}", prompt(64, number), params))
    gaps: list[float] = []
    while len(gaps) < 60:
        started = time.perf_counter()
        if len(engine.step()) >= streams:
            gaps.append(time.perf_counter() - started)
    steady = median(gaps[20:])
    engine.add(
        Request("stranger", prompt(tokens, 92), SamplingParams(max_tokens=1, temperature=0.0))
    )
    arrived = last = time.perf_counter()
    meanwhile: list[float] = []

    def seen(events: list[TokenEvent]) -> None:
        nonlocal last
        if any(event.id.startswith("live") for event in events):
            now = time.perf_counter()
            meanwhile.append(now - last)
            last = now

    while True:
        events = engine.step(hand_out=seen)
        seen(events)
        if any(event.id == "stranger" for event in events):
            break
    beside = time.perf_counter() - arrived
    for number in range(streams):
        engine.abort(f"live-{number}")
    while not engine.idle:
        engine.step()
    return (
        f"{streams} streams, steady step {1e3 * steady:.1f} ms; beside a prompt of {tokens}: gap "
        f"median {median(meanwhile) / steady:.2f}, largest {max(meanwhile) / steady:.2f} steps; "
        f"sweep {beside:.2f} s, alone {alone:.2f} s: {alone / beside:.0%} of its speed"
    )


def decode(
    engine: Engine, shape: Shape, streams: int, arguments: argparse.Namespace, tag: str
) -> dict[str, float]:
    """Run streams side by side; times of the steps after the first `arguments.warm`."""
    warm, steps = arguments.warm, arguments.steps
    params = SamplingParams(max_tokens=warm + steps + 30, temperature=0.0)
    for number in range(streams):
        engine.add(Request(f"{tag}-{number}", prompt(64, number), params))
    times: list[float] = []
    before = after = engine.stats().experts
    seen, worked = 0, 0.0
    while not engine.idle:
        tokens = len(engine.step())
        if tokens < streams:
            continue
        seen += 1
        if seen == warm:
            before = engine.stats().experts
        if warm <= seen < warm + steps:
            times.append(time.perf_counter())
            after = engine.stats().experts if seen == warm + steps - 1 else before
        if arguments.busy and seen == warm + steps:
            worked = busy(engine, 20)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    missed = (after.misses - before.misses) / max(1, len(times) - 1)
    computed = (after.computed - before.computed) / max(1, len(times) - 1)
    fetched = missed - computed
    used = missed + (after.hits - before.hits) / max(1, len(times) - 1)
    exposed = (after.exposed_seconds - before.exposed_seconds) / max(1, len(times) - 1)
    return {
        "streams": streams,
        "ms": 1e3 * median(gaps),
        "mean_ms": 1e3 * mean(gaps),
        "tokens_s": streams / mean(gaps),
        "p90_ms": 1e3 * sorted(gaps)[int(0.9 * len(gaps))],
        "fetched": fetched,
        "computed": computed,
        "used": used,
        "GB": missed * shape.blob / 1e9,
        "GB_s": missed * shape.blob / 1e9 / max(exposed, 1e-9),
        "exposed_ms": 1e3 * exposed,
        "busy": worked,
    }


def sweep(engine: Engine, tokens: int, seed: int) -> tuple[float, int]:
    """Seconds until the first token of a prompt, and what was fetched for it."""
    before = engine.stats().experts.misses
    started = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add(Request(f"sweep-{tokens}-{seed}", prompt(tokens, 1000 + seed), params))
    while not engine.idle:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - started, engine.stats().experts.misses - before


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--resident", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="*", default=[8, 8192])
    parser.add_argument("--warm", type=int, default=64)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--routing", help="uniform or zipf:A; default: the routers' own")
    parser.add_argument("--keep", type=float, default=0.0)
    parser.add_argument("--busy", action="store_true", help="profile the GPU for some steps")
    parser.add_argument("--stranger", type=int, help="tokens of a prompt beside 8 streams")
    parser.add_argument("--sweep-tokens", type=int, default=8192)
    parser.add_argument("--policy", default="lru_frequency")
    parser.add_argument("--cpu-experts", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        floors: dict[float, float] = {}  # streams -> the step with all resident, ms
        whole = SHAPES[arguments.shape]
        shape = replace(whole, layers=arguments.layers, vocab=arguments.vocab)
        path = shape.write_config(work / "shape")
        for resident in arguments.resident:
            run(arguments, shape, path, resident, floors)
    return 0


def against(shape: Shape, one: dict[str, float], floors: dict[float, float]) -> str:
    """A step against its bounds."""
    streams = int(one["streams"])
    needs = shape.touched(streams, one["used"]) / MEMORY
    text = f"{one['ms'] / 1e3 / needs:.2f} x what the memory needs"
    if not one["GB"]:
        floors[streams] = one["ms"]
    elif streams in floors:
        fetch = one["ms"] - floors[streams]
        text += f"; over the floor {fetch / (one['GB'] / LINK * 1e3):.3f} x bytes / link"
    return text + (f"; GPU busy {one['busy']:.1%}" if one["busy"] else "")


def run(
    arguments: argparse.Namespace,
    shape: Shape,
    path: Path,
    resident: float,
    floors: dict[float, float],
) -> None:
    """One residency."""
    rows = max(arguments.streams)
    started = time.perf_counter()
    config = Config(
        device="cuda",
        load_format="dummy",
        expert_slots=slots_for(resident, shape, rows),
        max_num_seqs=rows + (arguments.stranger is not None),
        kv_cache_tokens=65536,
        max_model_len=32768,
        host_memory=shape.layers * shape.experts * shape.blob,
        expert_policy=arguments.policy,
        cpu_experts=arguments.cpu_experts,
        cpu_expert_threads=arguments.cpu_threads,
        enable_prefix_caching=False,
        trace=arguments.trace,
        max_sweep_tokens=arguments.sweep_tokens,
    )
    made_up = Synthetic(scramble=True, routing=arguments.routing, keep=arguments.keep)
    engine = build_engine(config, path, synthetic=made_up)
    engine.finish_fill()
    took = time.perf_counter() - started
    used = torch.cuda.mem_get_info()
    print(f"resident {resident:.0%}: start {took:.1f} s, {engine.info.memory}", flush=True)
    print(f"  device memory in use {(used[1] - used[0]) / 2**20:.0f} MiB; {engine.info.notes}")
    for streams in arguments.streams:
        one = decode(engine, shape, streams, arguments, f"{resident}")
        print(
            "  {streams:.0f} streams: step {ms:.3f} ms (mean {mean_ms:.3f}, p90 {p90_ms:.3f}), "
            "{tokens_s:.0f} tok/s, {used:.0f} experts, {fetched:.1f} fetched and {computed:.1f} "
            "computed on the CPU = {GB:.3f} GB in {exposed_ms:.2f} ms "
            "({GB_s:.1f} GB/s); ".format(**one)
            + against(shape, one, floors),
            flush=True,
        )
    if arguments.stranger:
        print("  " + stranger(engine, arguments.stranger, min(8, rows)), flush=True)
    for tokens in arguments.prompts:
        for seed in range(3):
            seconds, fetched = sweep(engine, tokens, seed)
            print(
                f"  prompt of {tokens}: {1e3 * seconds:.1f} ms, {tokens / seconds:.0f} tok/s, "
                f"{fetched} experts fetched",
                flush=True,
            )
    engine.check()
    engine.close()
    del engine
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
