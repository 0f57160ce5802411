"""Somebody sends a very long prompt. Do the others notice?

One stream decodes. Then a long prompt arrives as text, is tokenized, and sweeps up the layers,
while /health is asked 50 times a second. Reported: how long /health took, and the largest gap in
the running stream against its normal step (the median gap before the stranger came).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import load, report
from tests.oracle import wire
from tests.oracle.serving import serve

HEALTH_P99 = 0.050  # seconds
LARGEST_GAP = 5.0  # normal steps
PROBES = 50.0  # a second


@dataclass
class Round:
    """What one round saw, in seconds."""

    health: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)  # gaps of the running stream
    during: list[float] = field(default_factory=list)
    stranger: float = 0.0  # until the stranger's first token


async def probe(port: int, seen: list[float], enough: asyncio.Event) -> None:
    """Ask /health at a steady rate; a slow answer does not delay the next question."""

    async def once() -> None:
        started = time.monotonic()
        status, _ = await wire.get(port, "/health")
        if status != 200:
            raise RuntimeError(f"/health says {status} while a prompt is swept")
        seen.append(time.monotonic() - started)

    async with asyncio.TaskGroup() as group:
        while not enough.is_set():
            group.create_task(once())
            await asyncio.sleep(1 / PROBES)


async def one_round(port: int, arguments: argparse.Namespace, number: int) -> Round:
    """A quiet stretch, then the stranger."""
    found, enough = Round(), asyncio.Event()
    running = load.Timed(time.monotonic())
    # With the ids, each token has its event, also one that completes no character.
    body = load.completion([20 + number] * 16, 12_000, return_token_ids=True)
    live = asyncio.create_task(follow(port, body, running))
    await asyncio.sleep(arguments.quiet)
    prober = asyncio.create_task(probe(port, found.health, enough))
    arrived = time.monotonic()
    text = f"{number} " + "the keeper climbed the stair and lit the lamp " * 10_000
    stranger = await load.stream(port, load.completion(text[: arguments.prompt], 2))
    left = time.monotonic()
    enough.set()
    await prober
    live.cancel()
    await asyncio.gather(live, return_exceptions=True)
    found.stranger = stranger.times[0] - arrived
    for start, end in zip(running.times, running.times[1:], strict=False):
        (found.during if arrived <= end and start <= left else found.before).append(end - start)
    return found


async def follow(port: int, body: dict[str, object], timed: load.Timed) -> None:
    """Read a stream into `timed` until cancelled."""
    reply = await wire.ask(port, "/v1/completions", body)
    try:
        async for event in reply.events():
            if event["choices"] and event["choices"][0].get("token_ids"):
                timed.times.append(time.monotonic())
    finally:
        await reply.leave()


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: a random demo-sized one)")
    parser.add_argument("--prompt", type=int, default=8000, help="characters of the long prompt")
    parser.add_argument("--quiet", type=float, default=3.0, help="seconds before it arrives")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="more flags for the server, after --")
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        model = arguments.model or load.demo_sized(work)
        log = work / "server.log"
        gc.freeze()  # a collector's pass in this process would look like a gap
        with serve(model, *arguments.flags, log=log, threads=arguments.threads) as served:
            rounds = [
                asyncio.run(one_round(served.port, arguments, number))
                for number in range(arguments.rounds + 1)
            ][1:]  # the first one warms up
    health = [seconds for one in rounds for seconds in one.health]
    gaps = [max(one.during) / median(one.before) for one in rounds]
    rows = [
        ("normal step, ms", report.spread([1e3 * median(one.before) for one in rounds])),
        ("median gap meanwhile, ms", report.spread([1e3 * median(one.during) for one in rounds])),
        ("largest gap meanwhile, steps", report.spread(gaps)),
        ("the stranger's first token, s", report.spread([one.stranger for one in rounds])),
        ("health, ms", report.spread([1e3 * seconds for seconds in health])),
    ]
    bars = [
        report.Bar("health p99", 1e3 * report.percentile(health, 0.99), 1e3 * HEALTH_P99, "ms"),
        report.Bar("largest gap (median of rounds)", median(gaps), LARGEST_GAP, "steps"),
    ]
    return report.finish(arguments, rows, bars, {"rounds": [vars(one) for one in rounds]})


if __name__ == "__main__":
    sys.exit(main())
