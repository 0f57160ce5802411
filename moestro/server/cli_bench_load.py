"""Many timed streams against a server, at a rate or a number at a time.

Owns: when requests start, and when their tokens came. Does not own: what is asked
(`cli_bench_prompts`) or what the times mean.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moestro.errors import MoestroError
from moestro.server.cli_bench_client import Server, asked, refusal
from moestro.server.cli_bench_prompts import Ask

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests start: `rate` a second at random (Poisson), else `concurrency` at a time."""

    rate: float | None = None
    concurrency: int = 1
    seed: int = 0


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times of the clock, one for each piece with tokens."""

    started: float
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float | None:
        """Seconds to the first token."""
        return self.times[0] - self.started if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def arrivals(count: int, pace: Pace) -> Iterator[float]:
    """Seconds from the start to each arrival at a rate; the first is at once."""
    assert pace.rate is not None
    draw, at = random.Random(pace.seed), 0.0
    for _ in range(count):
        yield at
        at += draw.expovariate(pace.rate)


async def run_load(
    server: Server,
    model: str,
    asks: Sequence[Ask],
    pace: Pace,
    clock: Clock = time.perf_counter,
) -> list[Stream]:
    """Run all requests to their end, in the order of `asks`. A failed one has its error."""
    if pace.rate is None:
        return await _together(server, model, asks, pace.concurrency, clock)
    began = clock()
    tasks = []
    for ask, at in zip(asks, arrivals(len(asks), pace), strict=True):
        await asyncio.sleep(max(0.0, began + at - clock()))
        tasks.append(asyncio.create_task(timed(server, model, ask, clock)))
    return list(await asyncio.gather(*tasks))


async def _together(
    server: Server, model: str, asks: Sequence[Ask], concurrency: int, clock: Clock
) -> list[Stream]:
    free = asyncio.Semaphore(concurrency)

    async def one(ask: Ask) -> Stream:
        async with free:
            return await timed(server, model, ask, clock)

    return list(await asyncio.gather(*(one(ask) for ask in asks)))


async def timed(server: Server, model: str, ask: Ask, clock: Clock) -> Stream:
    """One request to its end."""
    stream = Stream(clock())
    try:
        async with asked(server, ask.path, {"model": model, **ask.body}) as reply:
            if reply.status != 200:
                raise refusal(ask.path, reply.status, await reply.body())
            async for event in reply.events():
                _note(stream, event, clock)
    except MoestroError as error:
        stream.error = error.message
    return stream


def _note(stream: Stream, event: Any, clock: Clock) -> None:
    if "error" in event:
        raise MoestroError(str(event["error"].get("message", event["error"])))
    usage = event.get("usage") or {}
    stream.tokens = usage.get("completion_tokens", stream.tokens)
    stream.prompt_tokens = usage.get("prompt_tokens", stream.prompt_tokens)
    if any(_brings(choice) for choice in event.get("choices", ())):
        stream.times.append(clock())


def _brings(choice: dict[str, Any]) -> bool:
    """Whether this chunk has tokens: their ids where the server says them, else text."""
    if choice.get("token_ids"):
        return True
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))
