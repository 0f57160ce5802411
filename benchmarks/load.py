"""Streams against a server, and when their tokens arrived.

Owns: one timed stream, and many at once. Does not own: what the times mean.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.oracle import tiny, wire


@dataclass
class Timed:
    """One stream. Times in seconds of the monotonic clock, one for each piece of text."""

    started: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0  # as the server counted them
    text: str = ""

    @property
    def ended(self) -> float:
        """When the last piece came."""
        return self.times[-1] if self.times else self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def completion(prompt: Sequence[int] | str, tokens: int, **options: Any) -> dict[str, Any]:
    """Body of a greedy streamed completion of exactly this many tokens."""
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | options


async def stream(port: int, body: dict[str, Any]) -> Timed:
    """Run one streamed completion to its end."""
    timed = Timed(time.monotonic())
    reply = await wire.ask(port, "/v1/completions", body)
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {(await reply.body()).decode()}")
    try:
        async for event in reply.events():
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            text = "".join(choice.get("text") or "" for choice in event["choices"])
            if text:
                timed.times.append(time.monotonic())
                timed.text += text
            timed.tokens = (event.get("usage") or {}).get("completion_tokens", timed.tokens)
    finally:
        await reply.leave()
    return timed


async def together(port: int, bodies: Sequence[dict[str, Any]]) -> tuple[list[Timed], float]:
    """Run all at once. Returns them and the seconds from the first start to the last end."""
    started = time.monotonic()
    streams = list(await asyncio.gather(*(stream(port, body) for body in bodies)))
    return streams, time.monotonic() - started


def random_prompts(vocab: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Prompts of ordinary tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(8, vocab) for _ in range(length)] for _ in range(count)]


DEMO_SIZED = tiny.Spec(
    "qwen3_moe",
    0,
    hidden=128,
    layers=6,
    experts=32,
    top_k=4,
    head_width=32,
    intermediate=64,
    vocab=260,  # all of it has text, so that every token is seen arriving
    context=16384,
)


def demo_sized(folder: Path) -> Path:
    """A random checkpoint of the included demo's size with a long context, written once."""
    path = folder / "demo-sized"
    if not (path / "model.safetensors").exists():
        tiny.make(path, DEMO_SIZED)
    return path
