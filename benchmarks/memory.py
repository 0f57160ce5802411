"""Does the server keep to its two numbers when the experts are larger than both?

Serves a checkpoint whose experts are a few GB, with --gpu-memory and --host-memory far below
that, runs streams that touch every expert, and samples the resident memory of server and engine.
The limit is gpu_memory + host_memory + 500 MiB for two Pythons and torch (dense weights are a
part of gpu_memory). What the two share counts twice in it; the proportional size (PSS) does not.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from benchmarks import load, report
from tests.oracle import tiny, vocabulary
from tests.oracle.serving import Served, serve

PROGRAMS = 500 * 2**20  # bytes: interpreters, torch, and everything else that no flag counts
SPEC = tiny.Spec(
    "qwen3_moe",
    0,
    hidden=512,
    layers=12,
    experts=64,
    top_k=4,
    heads=8,
    kv_heads=2,
    intermediate=512,
    vocab=260,
    context=4096,
    dtype="bfloat16",
)  # 12 x 64 experts of 1.5 MiB = 1.1 GiB in the file, 2.3 GiB as float32


def write(folder: Path, spec: tiny.Spec) -> Path:
    """Write the checkpoint a layer at a time, experts packed, from one short stretch of numbers."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tiny.dump(folder / "config.json", tiny.config(spec))
    vocabulary.write(folder, vocabulary.build(), max_length=spec.context)
    weight_map: dict[str, str] = {}
    for name, tensors in _files(spec):
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    tiny.dump(index, {"metadata": {}, "weight_map": weight_map})
    return folder


def _files(spec: tiny.Spec) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """One file without experts, then one for each layer's."""
    dense = replace(spec, mlp_only_layers=tuple(range(spec.layers)), dense_intermediate=1)
    kept = {name: tensor for name, tensor in tiny.tensors(dense) if ".mlp." not in name}
    yield "dense.safetensors", kept
    stretch = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).bfloat16()
    up = (spec.experts, 2 * spec.intermediate, spec.hidden)
    down = (spec.experts, spec.hidden, spec.intermediate)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}.mlp."
        shapes = {
            prefix + "gate.weight": (spec.experts, spec.hidden),
            prefix + "experts.gate_up_proj": up,
            prefix + "experts.down_proj": down,
        }
        tensors = {
            name: _numbers(stretch, shape, layer) / shape[-1] ** 0.5
            for name, shape in shapes.items()
        }
        yield f"experts-{layer:03d}.safetensors", tensors


def _numbers(stretch: torch.Tensor, shape: tuple[int, ...], layer: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    repeated = stretch.roll(layer * 9973).repeat(-(-count // len(stretch)))
    return repeated[:count].reshape(shape).contiguous()


@contextmanager
def sampled(served: Served) -> Iterator[list[dict[str, float]]]:
    """Sample both processes ten times a second while inside."""
    seen: list[dict[str, float]] = []
    done = threading.Event()
    processes = {"server": psutil.Process(served.process.pid), "engine": served.engine}

    def watch() -> None:
        while not done.wait(0.1):
            now = {"time": time.monotonic()}
            for name, process in processes.items():
                info = process.memory_full_info()
                now |= {name: info.rss, f"{name}_pss": info.pss}
            seen.append(now)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


async def work(port: int, streams: int, rounds: int) -> float:
    """Prompts and answers that are new each round; tokens a second."""
    tokens, started = 0, time.monotonic()
    for number in range(rounds):
        prompts = load.random_prompts(SPEC.vocab, streams, 200, number)
        found, _ = await load.together(port, [load.completion(p, 24) for p in prompts])
        tokens += sum(one.tokens for one in found)
    return tokens / (time.monotonic() - started)


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--gpu-memory", type=int, default=512, help="MiB for the server")
    parser.add_argument("--host-memory", type=int, default=512, help="MiB for the server")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    allowed = (arguments.gpu_memory + arguments.host_memory) * 2**20
    flags = [
        f"--{pool}-memory={getattr(arguments, f'{pool}_memory')}MiB" for pool in ("gpu", "host")
    ]
    with report.workplace(arguments) as folder:
        model = write(folder / "large", SPEC)
        with (
            serve(model, *flags, "--max-sweep-tokens", "2048", log=folder / "log") as served,
            sampled(served) as seen,
        ):
            rate = asyncio.run(work(served.port, arguments.streams, arguments.rounds))
            experts = served.stats()["experts"]
    peak = max(one["server"] + one["engine"] for one in seen)
    shared = max(one["server_pss"] + one["engine_pss"] for one in seen)
    blobs = SPEC.layers * SPEC.experts * experts["expert_bytes"]
    mib = 2.0**20
    rows = [
        ("all experts, MiB", f"{blobs / mib:.0f}"),
        ("allowed for both pools, MiB", f"{allowed / mib:.0f}"),
        ("read from the disk, MiB", f"{experts['disk']['bytes_read'] / mib:.0f}"),
        ("tokens/s", f"{rate:.4g}"),
        ("peak of the server, MiB", f"{max(one['server'] for one in seen) / mib:.0f}"),
        ("peak of the engine, MiB", f"{max(one['engine'] for one in seen) / mib:.0f}"),
        ("peak of both as PSS, MiB", f"{shared / mib:.0f}"),
    ]
    bars = [
        report.Bar("experts over both pools", blobs / allowed, 1.0, "x", True),
        report.Bar("peak of both", peak / mib, (allowed + PROGRAMS) / mib, "MiB"),
    ]
    return report.finish(arguments, rows, bars, {"experts": experts, "samples": seen[::5]})


if __name__ == "__main__":
    sys.exit(main())
