"""Drive an engine in this process, without server and messages.

Owns: turning requests into outputs. Does not own: what the outputs should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestro.config import Config
from moestro.engine.build import build_engine
from moestro.engine.engine import Engine
from moestro.types import Finish, Request, SamplingParams, Timing, TokenLogprobs

TURNS = 200_000  # an engine that needs more than this is stuck


@dataclass
class Output:
    """What came out for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: Finish | None = None
    stop_token: int | None = None
    error: str | None = None
    timing: Timing | None = None  # of the last event


@contextmanager
def engine(checkpoint: Path, *, filled: bool = True, **settings: Any) -> Iterator[Engine]:
    """An engine over `checkpoint` in float32. On leaving it must be idle and its books right.

    `filled`: experts have come to memory as far as they fit, so that counts are the same always.
    """
    plain = {"device": "cpu", "dtype": "float32", "threads": 1}
    config = Config.model_validate(plain | settings)
    built = build_engine(config, checkpoint)
    try:
        if filled:
            built.finish_fill()
        yield built
        settle(built)
    finally:
        built.close()


def greedy(id: str, prompt: Sequence[int], tokens: int, **more: Any) -> Request:
    """A request for `tokens` greedy tokens, past any EOS."""
    return Request(id, tuple(prompt), SamplingParams(max_tokens=tokens, temperature=0.0, **more))


def generate(
    engine: Engine,
    requests: Iterable[Request],
    *,
    every: int | None = None,
    hurried: bool = False,
    running: Iterable[Request] = (),
) -> dict[str, Output]:
    """Run all requests to their end; with `every`, one more arrives each `every` turns.

    `hurried`: somebody always wants attention, so that a sweep pauses after each piece of work.
    `running` were added before and have had no event yet.
    """
    coming = list(requests)[::-1]
    outputs = {request.id: Output() for request in [*coming, *running]}
    for turn in range(TURNS):
        while coming and (every is None or turn % every == 0 or engine.idle):
            engine.add(coming.pop())
            if every is not None:
                break
        for event in engine.step(lambda: hurried):
            _record(outputs[event.id], event)
        if not coming and engine.idle:
            return outputs
    left = [id for id, output in outputs.items() if output.finish is None]
    raise AssertionError(f"after {TURNS} turns these have not finished: {left}")


def settle(engine: Engine) -> None:
    """An idle engine holds nothing: no sequence, no KV block, no lease."""
    for _ in range(100):
        if engine.idle:
            break
        engine.step()
    assert engine.idle
    engine.check()
    stats = engine.stats()
    assert stats.kv.blocks_used == 0
    assert (stats.scheduler.running, stats.scheduler.waiting) == (0, 0)


def _record(output: Output, event: Any) -> None:
    assert output.finish is None, "an event came after the last one"
    output.tokens += event.token_ids
    output.logprobs += event.logprobs
    if event.prompt_logprobs is not None:
        assert output.prompt_logprobs is None, "prompt log-probabilities came twice"
        output.prompt_logprobs = event.prompt_logprobs
    output.finish = event.finish
    output.stop_token = event.stop_token
    output.error = event.error
    output.timing = event.timing or output.timing
