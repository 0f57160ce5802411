"""The sampler row by row, against a literal reading of what each parameter means."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.engine.sampler import Sampler, draw, uniform
from moestro.grammar.compiler import Compiler
from moestro.grammar.vocabulary import Vocabulary
from moestro.types import Grammar, Request, SamplingParams
from tests.oracle import vocabulary

VOCAB = 12
PLAIN = SamplingParams(max_tokens=8, temperature=1.0, seed=5)


def literal(logits: list[float], params: SamplingParams, number: float) -> int:
    """Inverse cumulative sampling over what the filters leave, in token order."""
    top = max(logits)
    heat = [math.exp((x - top) / params.temperature) for x in logits]
    probs = [x / sum(heat) for x in heat]
    probs = [p if p >= params.min_p * max(probs) else 0.0 for p in probs]
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))
    kept = order[: params.top_k or len(order)]
    mass = sum(probs[t] for t in kept)
    chosen, before = set(), 0.0
    for token in kept:
        if before >= params.top_p * mass:
            break
        chosen.add(token)
        before += probs[token]
    total = sum(probs[t] for t in chosen)
    running = 0.0
    for token in range(len(probs)):
        if token in chosen:
            running += probs[token]
            if running > number * total:
                return token
    return max(chosen)


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(st.floats(-6, 6), min_size=VOCAB, max_size=VOCAB),
    temperature=st.floats(0.05, 3),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 1.0]),
    top_k=st.integers(0, 14),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    number=st.floats(0.001, 0.999),
)
def test_draw_equals_the_literal_reading(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float, number: float
) -> None:
    params = replace(PLAIN, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    rounded = torch.tensor(logits)
    rounded -= rounded.max()  # as `draw` does: differences that this rounds away are ties
    neighbour = replace(PLAIN, top_k=2, top_p=0.5, min_p=0.2)
    got = draw(torch.stack([rounded, -rounded]), [params, neighbour], [number, 0.5])[0]
    nearby = {
        literal(
            rounded.tolist(),
            replace(params, top_p=top_p * e, min_p=min(1.0, min_p * e)),
            number + d,
        )
        for d in (-1e-6, 0.0, 1e-6)
        for e in (1 - 1e-9, 1.0, 1 + 1e-9)  # which side of a boundary rounding falls on
    }
    assert got in nearby


@pytest.mark.parametrize("temperature", [1e-4, 1e-30])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9, -1e4]])
    assert draw(logits, [replace(PLAIN, temperature=temperature)], [0.999]) == [1]


def test_uniform_depends_on_seed_and_position_and_fills_the_interval() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < n < 1 for n in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert uniform(7, 3) == uniform(7, 3)
    buckets = [sum(i / 10 <= n < (i + 1) / 10 for n in numbers) for i in range(10)]
    assert min(buckets) > 150


def sample(params: SamplingParams, logits: list[float], index: int = 0, **more: object) -> int:
    sampler = Sampler(VOCAB)
    sampler.add(Request("a", (1, 2), params, **more))  # type: ignore[arg-type]
    return sampler.sample(["a"], [index], torch.tensor([logits]))[0].token


def test_edits_of_the_logits() -> None:
    greedy = replace(PLAIN, temperature=0.0)
    rising = [float(i) for i in range(VOCAB)]
    assert sample(greedy, rising) == 11
    assert sample(replace(greedy, logit_bias={11: -100.0}), rising) == 10
    assert sample(replace(greedy, logit_bias={0: 100.0}), rising) == 0
    banned = replace(greedy, min_tokens=2, eos_token_ids=(11,), stop_token_ids=(10,))
    assert sample(banned, rising, index=1) == 9
    assert sample(banned, rising, index=2) == 11
    flat = [1.0] * VOCAB
    flat[2] = 1.5
    assert sample(replace(greedy, repetition_penalty=2.0), flat) not in (1, 2)
    negative = [-1.0] * VOCAB
    negative[2] = -0.9
    assert sample(replace(greedy, repetition_penalty=2.0), negative) == 0
    assert sample(replace(greedy, presence_penalty=1.0), flat) == 2, "the prompt does not count"
    assert sample(replace(greedy, presence_penalty=1.0), flat, generated=(2,)) == 0
    assert sample(replace(greedy, frequency_penalty=0.3), flat, generated=(2,)) == 2
    assert sample(replace(greedy, frequency_penalty=0.3), flat, generated=(2, 2)) == 0


def test_penalties_count_tokens_as_they_are_sampled() -> None:
    sampler = Sampler(4)
    params = replace(PLAIN, temperature=0.0, frequency_penalty=1.0)
    sampler.add(Request("a", (0,), params))
    logits = [[2.5, 2.0, 0.0, 0.0]]
    tokens = [sampler.sample(["a"], [i], torch.tensor(logits))[0].token for i in range(4)]
    assert tokens == [0, 1, 0, 1]


def test_logprobs_are_of_the_raw_logits_whatever_was_edited() -> None:
    sampler = Sampler(4)
    params = replace(PLAIN, temperature=0.0, logprobs=2, logit_bias={3: 50.0})
    sampler.add(Request("a", (0,), params))
    logits = torch.tensor([[1.0, 2.0, 0.0, -1.0]])
    expected = torch.log_softmax(logits[0], -1)
    report = sampler.sample(["a"], [0], logits.clone())[0].logprobs
    assert report is not None
    assert report.token_id == 3
    assert report.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert [token for token, _ in report.top] == [1, 0]
    assert report.top[0][1] == pytest.approx(float(expected[1]), abs=1e-6)


def test_masks_of_grammars(tmp_path: Path) -> None:
    """Masked rows beside free ones: before every other edit, and blind to what is not allowed."""
    text = vocabulary.build()
    vocabulary.write(tmp_path, text, max_length=64)
    size, a = len(text) + 13, text.id(b"a")
    tokens = Vocabulary(tmp_path, size=size, eos_token_ids=(vocabulary.EOS,))
    sampler, compiler = Sampler(size), Compiler(tokens)
    greedy = replace(PLAIN, temperature=0.0, eos_token_ids=(vocabulary.EOS,))
    biased = replace(greedy, logit_bias={a + 1: -50.0, 9: 100.0}, logprobs=1)
    for id, params in {"free": greedy, "a": greedy, "b": biased, "hot": PLAIN}.items():
        matcher = None if id == "free" else compiler.matcher(Grammar("regex", "[abc]{2}"))
        sampler.add(Request(id, (0,), params), matcher)
    rows = torch.zeros(4, size)
    rows[:, -1] = 9.0  # an id that the tokenizer has not
    rows[:, a + 1] = 1.0
    ids = ["free", "a", "b", "hot"]
    for index in range(3):
        got = sampler.sample(ids, [index] * len(ids), rows[: len(ids)].clone())
        assert {one.error for one in got} == {None}
        assert got[0].token == size - 1
        if index == 2:
            assert [one.token for one in got[1:3]] == [vocabulary.EOS] * 2
            continue
        assert [one.token for one in got[1:3]] == [a + 1, a]
        assert got[3].token in (a, a + 1, a + 2)
        assert got[3].complete == (index == 1), "it has no EOS to say so"
        ids = ids[:3] if got[3].complete else ids
        report = got[2].logprobs
        assert report is not None
        assert report.top[0] == (size - 1, pytest.approx(float(torch.log_softmax(rows[2], -1)[-1])))


def test_rounding_does_not_lead_behind_the_last_token() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]])
    assert draw(logits, [PLAIN], [1.0]) == [1]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    sampler = Sampler(3)
    for id in "abc":
        sampler.add(Request(id, (0,), replace(PLAIN, temperature=0.0 if id == "a" else 1.0)))
    logits = torch.tensor([[0.0, 1.0, 0.0], [0.0, float("nan"), 0.0], [9.0, -9.0, -9.0]])
    got = sampler.sample(["a", "b", "c"], [0, 0, 0], logits)
    assert [one.error is None for one in got] == [True, False, True]
    assert (got[0].token, got[2].token) == (1, 0)
