"""Log-probabilities equal transformers' within 1e-4, of prompts and of what is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moestro.types import Request, SamplingParams, TokenLogprobs
from tests.oracle import drive, specs
from tests.oracle.golden import NEW_TOKENS, Case, Golden

Checkpoints = Callable[[str], Path]
Goldens = Callable[[str], Golden]

WITHIN = 1e-4


def assert_close(
    found: Sequence[TokenLogprobs], tokens: Sequence[int], want: Sequence[float]
) -> None:
    """The reports are of these tokens, with these values."""
    assert [one.token_id for one in found] == list(tokens)
    assert [one.logprob for one in found] == pytest.approx(list(want), abs=WITHIN, rel=0)


def forced(number: int, case: Case, **more: Any) -> Request:
    """Prompt and answer together as one prompt that asks for its log-probabilities."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2, **more)
    return Request(str(number), case.prompt + case.tokens, sampling)


@pytest.mark.parametrize("name", specs.SPECS)
@pytest.mark.parametrize("window", [8192, 48])
def test_of_a_prompt(name: str, window: int, checkpoint: Checkpoints, golden: Goldens) -> None:
    cases = golden(name).cases
    with drive.engine(checkpoint(name), max_sweep_tokens=window) as engine:
        outputs = drive.generate(engine, [forced(n, case) for n, case in enumerate(cases)])
        for number, case in enumerate(cases):
            found = outputs[str(number)].prompt_logprobs
            assert found is not None
            assert found[0] is None  # nothing predicts the first token
            rest = [one for one in found[1:] if one is not None]
            assert_close(rest, (case.prompt + case.tokens)[1:], case.logprobs)
            assert {len(one.top) for one in rest} == {2}


@pytest.mark.parametrize("name", specs.FULL_MATRIX)
def test_of_a_prompt_that_was_seen_before(
    name: str, checkpoint: Checkpoints, golden: Goldens
) -> None:
    case = golden(name).cases[-1]
    with drive.engine(checkpoint(name)) as engine:
        for _ in range(2):  # reused blocks have no logits: they must be computed again
            found = drive.generate(engine, [forced(0, case)])["0"].prompt_logprobs
            assert found is not None
            rest = [one for one in found[1:] if one is not None]
            assert_close(rest, (case.prompt + case.tokens)[1:], case.logprobs)


@pytest.mark.parametrize("name", specs.FULL_MATRIX)
def test_of_greedy_text(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    cases = golden(name).cases
    with drive.engine(checkpoint(name), kv_cache_tokens=320) as engine:
        requests = [
            drive.greedy(str(n), case.prompt, NEW_TOKENS, logprobs=n % 3)
            for n, case in enumerate(cases)
        ]
        outputs = drive.generate(engine, requests)
        assert engine.stats().scheduler.preemptions > 0
    for number, case in enumerate(cases):
        output = outputs[str(number)]
        assert_close(output.logprobs, case.tokens, case.logprobs[len(case.prompt) - 1 :])
        for one in output.logprobs:
            assert len(one.top) == number % 3
            if one.top:  # greedy: the chosen token is the best, and the best comes first
                assert one.top[0] == (one.token_id, one.logprob)
                assert list(one.top) == sorted(one.top, key=lambda pair: -pair[1])
