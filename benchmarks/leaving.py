"""What is left behind by requests that are over, and by clients that leave?

Two parts. First, clients leave in the middle of long generations, streamed or not, with a clean
close or a reset: reported is the time until the engine holds nothing of them any more (no
sequence, no KV block), against one decode step and 100 ms. Then 10,000 short requests run, a few
at a time: reported is how much the resident memory of both processes grew over the last 8,000.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from benchmarks import load, report
from tests.oracle import wire
from tests.oracle.serving import Served, is_idle, serve

GRACE = 0.100  # seconds beside one decode step
GROWTH = 0.02  # of the resident memory, over the counted requests


@dataclass(frozen=True)
class Left:
    """One departure, in seconds."""

    stream: bool
    reset: bool
    crowd: int  # sequences that left at once
    gone: float  # until the engine held nothing
    step: float  # a decode step at that time


async def leave(served: Served, *, stream: bool, reset: bool, crowd: int) -> Left:
    """Start `crowd` long generations, close all their sockets, wait for the engine."""
    body = load.completion([30, 31, 32], 10_000) | {"stream": stream}
    if not stream:
        del body["stream_options"]
    open_ones = [await wire.send(served.port, "/v1/completions", body) for _ in range(crowd)]
    await asyncio.to_thread(served.wait, lambda s: s["scheduler"]["decoding"] == crowd, "decoding")
    await asyncio.sleep(0.3)
    step = served.stats()["step_seconds"]
    started = time.monotonic()
    for reader, writer in open_ones:
        await wire.Reply(0, {}, reader, writer).leave(reset=reset)
    await asyncio.to_thread(served.wait, is_idle, "idle")
    return Left(stream, reset, crowd, time.monotonic() - started, step)


async def departures(served: Served, rounds: int) -> list[Left]:
    """Every kind of departure, a few times each."""
    kinds = itertools.product((True, False), (True, False), (1, 8))
    return [
        await leave(served, stream=stream, reset=reset, crowd=crowd)
        for stream, reset, crowd in kinds
        for _ in range(rounds)
    ]


def resident(served: Served) -> dict[str, int]:
    """Resident bytes of both processes."""
    return {
        "server": psutil.Process(served.process.pid).memory_info().rss,
        "engine": served.engine.memory_info().rss,
    }


async def many_short(served: Served, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all the requests; resident memory after each thousandth part of them."""
    seen: list[dict[str, Any]] = []
    numbers = iter(range(arguments.requests))
    every = max(1, arguments.requests // 50)

    async def worker() -> None:
        for number in numbers:
            if number % every == 0:
                seen.append({"request": number} | resident(served))
            prompt = [8 + (number * 7 + i * i) % 240 for i in range(3 + number % 14)]
            body = load.completion(prompt, 1 + number % 8) | {"stream": number % 2 == 0}
            if not body["stream"]:
                del body["stream_options"]
            reply = await wire.ask(served.port, "/v1/completions", body)
            await reply.body()
            await reply.leave()
            if reply.status != 200:
                raise RuntimeError(f"request {number} was answered {reply.status}")

    await asyncio.gather(*(worker() for _ in range(arguments.parallel)))
    seen.append({"request": arguments.requests} | resident(served))
    return seen


def growth(seen: list[dict[str, Any]], process: str, after: int) -> float:
    """Share by which the resident memory of a process grew since request number `after`."""
    first = next(one for one in seen if one["request"] >= after)[process]
    return float(seen[-1][process] / first - 1)


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--settle", type=int, default=2000, help="requests not counted at first")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="departures of each kind")
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        model = load.demo_sized(work)
        # A small KV pool, so that it is full, and its blocks are reused, before counting starts.
        with serve(model, "--kv-cache-tokens", "16384", log=work / "server.log") as served:
            left = asyncio.run(departures(served, arguments.rounds))
            started = time.monotonic()
            seen = asyncio.run(many_short(served, arguments))
            took = time.monotonic() - started
            served.wait_idle()
    over = [1e3 * (one.gone - one.step) for one in left]
    rows = [
        ("gone after leaving, ms", report.spread([1e3 * one.gone for one in left])),
        ("of which over one step, ms", report.spread(over)),
        ("short requests a second", f"{arguments.requests / took:.4g}"),
        ("resident, server and engine, MiB", " and ".join(
            f"{seen[-1][process] / 2**20:.1f}" for process in ("server", "engine")
        )),
    ]  # fmt: skip
    bars = [report.Bar("gone over one step, p90", report.percentile(over, 0.9), 1e3 * GRACE, "ms")]
    for name in ("server", "engine"):
        percent = 100 * growth(seen, name, arguments.settle)
        bars.append(report.Bar(f"growth of the {name}", percent, 100 * GROWTH, "%"))
    details = {
        "departures": [vars(one) for one in left],
        "median_gone": median(o.gone for o in left),
    }
    return report.finish(arguments, rows, bars, details | {"memory": seen})


if __name__ == "__main__":
    sys.exit(main())
