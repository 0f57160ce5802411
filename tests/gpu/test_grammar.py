"""Grammars on a real GPU: steps launched ahead, faults, sequences that give way and leave."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moestro.types import Finish, Grammar, Request, SamplingParams
from tests.gpu.test_parity import GPU, starved
from tests.models.test_parity import blob, experts
from tests.oracle import drive
from tests.oracle.specs import SPECS
from tests.oracle.vocabulary import EOS, FIRST_BYTE

Checkpoints = Callable[[str], Path]
NAME, STEPS = "qwen3", 2_000
PATTERNS = ("[a-m]{3}-[n-z]{2,9}", "([a-f][0-9]){25}", "(yes|no|maybe)")


def bound(id: str, pattern: str, seed: int, **sampling: Any) -> Request:
    """A request whose prompt is like no other."""
    params = {"temperature": 1.0, "seed": seed, "eos_token_ids": (EOS,)} | sampling
    grammar = Grammar("regex", pattern)
    prompt = tuple((seed * 31 + n * n) % 250 for n in range(40))
    return Request(id, prompt, SamplingParams(60, grammar=grammar, **params))


def matches(pattern: str, tokens: list[int]) -> bool:
    said = bytes(token - FIRST_BYTE for token in tokens if token != EOS)
    return re.fullmatch(pattern, said.decode()) is not None


def test_neighbours_change_nothing(checkpoint: Checkpoints) -> None:
    with drive.engine(checkpoint(NAME), **GPU) as engine:
        requests = [bound(f"{n}", PATTERNS[n % 3], n) for n in range(6)]
        requests += [drive.greedy(f"free{n}", range(n, n + 20), 40) for n in range(2)]
        requests += [bound("top", PATTERNS[1], 9, top_k=4, top_p=0.8, logprobs=2)]
        alone = {one.id: drive.generate(engine, [one])[one.id].tokens for one in requests}
        together = drive.generate(engine, requests, every=2)
    assert {id: out.tokens for id, out in together.items()} == alone
    for one in requests:
        if one.sampling.grammar is not None:
            assert matches(one.sampling.grammar.text, alone[one.id])


def test_whatever_happens_what_ends_matches(checkpoint: Checkpoints) -> None:
    """A third of the experts is on disk, and the KV pool holds fewer than want to run."""
    draw = random.Random(1)
    host = experts(SPECS[NAME]) * 2 // 3 * blob(SPECS[NAME])
    scarce = starved(NAME, host_memory=host, kv_cache_tokens=256, max_sweep_tokens=64)
    said: dict[str, list[int]] = {}
    asked: dict[str, str] = {}
    with drive.engine(checkpoint(NAME), **scarce) as engine:
        number = ended = 0
        while engine.stats().scheduler.decode_steps < STEPS:
            if len(said) < 7 and draw.random() < 0.3:
                number += 1
                id = f"r{number}"
                said[id], asked[id] = [], draw.choice(PATTERNS)
                if number % 3:
                    engine.add(bound(id, asked[id], number))
                else:
                    asked[id] = ""
                    engine.add(drive.greedy(id, range(number % 200, number % 200 + 40), 60))
            if said and draw.random() < 0.02:
                id = draw.choice(sorted(said))
                engine.abort(id)
                del said[id]
            for event in engine.step():
                assert event.error is None, event.error
                said[event.id] += event.token_ids
                if event.finish is not None:
                    tokens = said.pop(event.id)
                    ended += event.finish is Finish.STOP
                    assert not asked[event.id] or matches(asked[event.id], tokens)
        for id in said:
            engine.abort(id)
        drive.settle(engine)
        assert engine.stats().scheduler.preemptions > 0
    assert ended > 50
