"""Mixed traffic for a while: does the server's memory stay where it is?

Owns: the requests, the clients that leave, and the samples of resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks import report
from tests.oracle import wire
from tests.oracle.serving import Served

LEAVING = 0.05  # of the clients
EVERY = 5.0  # seconds between two samples
SETTLE = 1 / 3  # of the time; what grew until then is not counted
GROWTH = 2.0  # percent of the resident memory
PACE = 200  # tokens a second of each stream
LENGTHS = (1, 4, 16, 40, 100, 300)

WORDS = ("what", "which", "letters", "are", "there", "and", "how", "many", "of", "them")


@dataclass
class Soaked:
    """What came of it."""

    resident: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes
    requests: Counter[str] = field(default_factory=Counter)  # by route
    left: int = 0


def body(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a request: any route, any length, streamed or not, sometimes with more."""
    text = " ".join(dice.choices(WORDS, k=dice.choice((1, 5, 30, 200))))
    asked: dict[str, Any] = {"stream": dice.random() < 0.7, "temperature": 0.5}
    length = dice.choice(LENGTHS)
    path = dice.choice(("/v1/chat/completions",) * 3 + ("/v1/completions",) * 2 + DIALECTS)
    if path == "/v1/responses":
        return path, asked | {"input": text, "max_output_tokens": max(16, length)}
    messages = [{"role": "user", "content": text}]
    if path == "/v1/messages":
        return path, asked | {"messages": messages, "max_tokens": length, "model": "letters"}
    asked |= {"max_tokens": length, "ignore_eos": True, "priority": PACE}
    asked |= {"n": 2} if dice.random() < 0.2 else {}
    asked |= {"stop": ["zyx", "!"]} if dice.random() < 0.2 else {}
    if asked["stream"] and dice.random() < 0.5:
        asked["stream_options"] = {"include_usage": True}
    scored = dice.random() < 0.2
    if path == "/v1/chat/completions":
        return path, asked | {"messages": messages} | (SCORED if scored else {})
    return path, asked | {"prompt": text} | ({"logprobs": 3} if scored else {})


DIALECTS = ("/v1/responses", "/v1/messages")
SCORED = {"logprobs": True, "top_logprobs": 3}


async def _ask(served: Served, soaked: Soaked, dice: random.Random) -> None:
    path, asked = body(dice)
    soaked.requests[path] += 1
    reader, writer = await wire.send(served.port, path, asked)
    reply = wire.Reply(0, {}, reader, writer)
    if dice.random() < LEAVING:
        soaked.left += 1
        await asyncio.sleep(dice.random() * 0.5)
        await reply.leave(reset=dice.random() < 0.5)
        return
    try:
        reply = await wire.head(reader, writer)
        content = await reply.body()
        if reply.status != 200 or b'"error":{' in content:
            raise RuntimeError(f"{reply.status} to {asked}: {content[-500:]!r}")
    finally:
        await reply.leave()


async def run(served: Served, soaked: Soaked, arguments: argparse.Namespace) -> None:
    """Run the traffic for `arguments.soak` minutes. Raises for an answer that is no good."""
    end = time.monotonic() + 60 * arguments.soak

    async def worker(number: int) -> None:
        dice = random.Random(f"{arguments.seed} {number}")
        while time.monotonic() < end:
            await _ask(served, soaked, dice)

    async def watch() -> None:
        process = psutil.Process(served.process.pid)
        started = time.monotonic()
        for number in itertools.count(1):
            soaked.resident.append((time.monotonic() - started, process.memory_info().rss))
            until = started + number * EVERY
            if until > end:
                return
            await asyncio.sleep(until - time.monotonic())
            if number % 60 == 0:
                print(_shown(soaked), flush=True)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for number in range(arguments.parallel):
            group.create_task(worker(number))


def _shown(soaked: Soaked) -> str:
    when, size = soaked.resident[-1]
    return f"{when / 60:.1f} min: {sum(soaked.requests.values())} requests, {size / 2**20:.1f} MiB"


def growth(resident: list[tuple[float, int]]) -> float:
    """Percent by which memory grew, from the first samples after the settling to the last ones."""
    counted = [size for when, size in resident if when >= SETTLE * resident[-1][0]]
    few = max(1, len(counted) // 20)
    first, last = (sum(part) / few for part in (counted[:few], counted[-few:]))
    return 100 * (last / first - 1)


def report_of(served: Served, arguments: argparse.Namespace) -> int:
    """Run the traffic and say what it showed."""
    soaked = Soaked()
    asyncio.run(run(served, soaked, arguments))
    served.wait_idle()
    routes = ", ".join(f"{path}: {count}" for path, count in sorted(soaked.requests.items()))
    sizes = [size / 2**20 for _, size in soaked.resident]
    rows = [
        ("requests", f"{sum(soaked.requests.values())} ({routes})"),
        ("clients that left", soaked.left),
        ("resident, MiB: start, after settling, end, most", ", ".join(
            f"{size:.1f}" for size in
            (sizes[0], sizes[int(SETTLE * len(sizes))], sizes[-1], max(sizes))
        )),
    ]  # fmt: skip
    counted = (1 - SETTLE) * arguments.soak
    bar = report.Bar(
        f"growth over the last {counted:.0f} minutes", growth(soaked.resident), GROWTH, "%"
    )
    return report.finish(arguments, rows, [bar], {"resident": soaked.resident})
