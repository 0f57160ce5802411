"""Whatever happens on a GPU, tables, owners and bytes agree, and residency changes no bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moestro.engine.engine import Engine
from moestro.types import Request, SamplingParams
from tests.gpu.test_parity import GPU, starved
from tests.models.test_parity import blob, experts
from tests.oracle import drive
from tests.oracle.specs import FULL_MATRIX, SPECS

Checkpoints = Callable[[str], Path]
STEPS = 10_000


@pytest.mark.timeout(280)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_steps_leave_the_books_right(seed: int, checkpoint: Checkpoints) -> None:
    """Misses, evictions, faults (a third of the experts on disk), aborts and preemptions."""
    draw = random.Random(seed)
    host = experts(SPECS["qwen3"]) * 2 // 3 * blob(SPECS["qwen3"])
    scarce = starved("qwen3", host_memory=host, kv_cache_tokens=320, max_sweep_tokens=64)
    with drive.engine(checkpoint("qwen3"), **scarce) as engine:
        number = 0
        live: list[str] = []
        while engine.stats().scheduler.decode_steps < STEPS // 2:
            if len(live) < 7 and draw.random() < 0.3:
                number += 1
                live.append(f"r{number}")
                engine.add(request(live[-1], draw))
            if live and draw.random() < 0.02:
                engine.abort(live.pop(draw.randrange(len(live))))
            for event in engine.step():
                if event.finish is not None:
                    assert event.error is None, event.error
                    live.remove(event.id)
            if draw.random() < 0.002:
                for id in live:
                    engine.abort(id)
                live.clear()
                verify(engine)
        for id in live:
            engine.abort(id)
        verify(engine)
        stats = engine.stats()
        assert stats.scheduler.preemptions > 0
        assert stats.experts.evictions > 100
        assert stats.experts.disk.bytes_read > 0


def request(id: str, draw: random.Random) -> Request:
    prompt = tuple(draw.randrange(250) for _ in range(draw.randrange(1, 90)))
    sampling: dict[str, Any] = {"temperature": draw.choice([0.0, 0.7, 1.5])}
    if draw.random() < 0.2:
        sampling |= {"top_k": draw.randrange(1, 20), "top_p": 0.9}
    if draw.random() < 0.1:
        sampling |= {"presence_penalty": 0.5, "logprobs": 2}
    sampling["seed"] = draw.getrandbits(64)
    return Request(id, prompt, SamplingParams(draw.randrange(1, 60), **sampling))


def verify(engine: Engine) -> None:
    drive.settle(engine)
    engine._cache.check(verify_bytes=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", FULL_MATRIX)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_residency_changes_no_bit(name: str, dtype: str, checkpoint: Checkpoints) -> None:
    results = []
    for settings in (GPU, starved(name)):
        with drive.engine(checkpoint(name), **settings | {"dtype": dtype}) as engine:
            requests = [
                Request(
                    f"{n}",
                    tuple(range(n + 1, n + 20)),
                    SamplingParams(60, temperature=n / 3, seed=n, logprobs=1),
                )
                for n in range(4)
            ]
            found = drive.generate(engine, requests)
            results.append({id: (one.tokens, one.logprobs) for id, one in found.items()})
            missed = engine.stats().experts.misses
    assert missed > 0
    assert results[0] == results[1]


def test_seeds_give_the_cpu_s_tokens(checkpoint: Checkpoints) -> None:
    """Counter-based sampling, filters, penalties and bias: one meaning on both kinds of device."""
    variants: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 7},
        {"temperature": 1.2, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 30, "top_p": 0.95},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {3: 4.0, 5: -100.0}},
        {"temperature": 0.9, "min_tokens": 10, "stop_token_ids": tuple(range(40, 90))},
    ]
    requests = [
        Request(str(n), tuple(range(5, 25)), SamplingParams(24, seed=n * 7919, **variant))
        for n, variant in enumerate(variants)
    ]
    texts = []
    for settings in ({}, starved("qwen3")):
        with drive.engine(checkpoint("qwen3"), **settings) as engine:
            found = drive.generate(engine, requests)
            texts.append({id: (one.tokens, one.finish) for id, one in found.items()})
    assert texts[0] == texts[1]
