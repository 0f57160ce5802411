"""Sampling against a reference written here from the API's definitions, on transformers' logits.

Near ties: the reference stops where two candidates are too close to call, and the engine is
compared up to there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.types import Finish, Request, SamplingParams
from tests.oracle import drive
from tests.oracle import golden as oracle

Checkpoints = Callable[[str], Path]
Goldens = Callable[[str], oracle.Golden]

NAME = "qwen3"
TOO_CLOSE = 2e-4  # logits


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Any:
    return oracle.load(checkpoint(NAME))


def edited(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], out: Sequence[int]
) -> torch.Tensor:
    """Logits [vocab] after bias, bans and penalties, one token at a time."""
    logits = logits.double().clone()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(out) < params.min_tokens:
        for token in (*params.eos_token_ids, *params.stop_token_ids):
            logits[token] = -math.inf
    for token in {*prompt, *out}:
        factor = params.repetition_penalty
        logits[token] *= 1 / factor if logits[token] > 0 else factor
    for token, count in Counter(out).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def greedy_reference(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Greedy text under `params`, up to the first near tie."""
    out: list[int] = []
    ends = {*params.eos_token_ids, *params.stop_token_ids}
    while len(out) < params.max_tokens:
        logits = edited(oracle.forward(model, [*prompt, *out])[-1], params, prompt, out)
        best = logits.topk(2)
        if best.values[0] - best.values[1] < TOO_CLOSE:
            break
        out.append(int(best.indices[0]))
        if out[-1] in ends:
            break
    return out


EDITS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.3},
    "repetition-below-one": {"repetition_penalty": 0.8},
    "both-counts": {"presence_penalty": -0.7, "frequency_penalty": 1.1},
    "bias": {"logit_bias": {7: 4.0, 100: -100.0, 251: 3.0}},
    "forced": {"logit_bias": {42: 100.0}},
    "all": {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {9: 2.0, 180: -3.0},
    },
}


@pytest.mark.parametrize("slots", [None, 3])
def test_edited_logits(
    slots: int | None, model: Any, checkpoint: Checkpoints, golden: Goldens
) -> None:
    prompts = [case.prompt for case in golden(NAME).cases[2:10]]
    requests, wanted = [], {}
    for (name, edit), prompt in zip(EDITS.items(), prompts, strict=True):
        params = SamplingParams(max_tokens=32, temperature=0.0, **edit)  # type: ignore[arg-type]
        requests.append(Request(name, prompt, params))
        wanted[name] = greedy_reference(model, prompt, params)
    with drive.engine(checkpoint(NAME), expert_slots=slots, kv_cache_tokens=96) as engine:
        outputs = drive.generate(engine, requests)
        assert engine.stats().scheduler.preemptions > 0  # counts must survive it
    for name, want in wanted.items():
        assert outputs[name].tokens[: len(want)] == want, name
    assert sum(map(len, wanted.values())) > 0.8 * 32 * len(wanted)
    plain = {tuple(case.tokens[:32]) for case in golden(NAME).cases}
    assert not plain & {tuple(output.tokens) for output in outputs.values()}


def test_the_end(model: Any, checkpoint: Checkpoints, golden: Goldens) -> None:
    case = golden(NAME).cases[5]
    token = case.tokens[9]
    length = case.tokens.index(token) + 1
    base = SamplingParams(max_tokens=40, temperature=0.0)
    ends = {
        "eos": replace(base, eos_token_ids=(token,)),
        "stop": replace(base, stop_token_ids=(token,)),
        "later": replace(base, eos_token_ids=(token,), min_tokens=length + 5),
        "length": base,
    }
    with drive.engine(checkpoint(NAME)) as engine:
        outputs = drive.generate(engine, [Request(n, case.prompt, p) for n, p in ends.items()])
    ended = tuple(case.tokens[:length])
    assert [tuple(outputs[name].tokens) for name in ("eos", "stop")] == [ended, ended]
    assert [outputs[n].stop_token for n in ends] == [None, token, None, None]
    reference = greedy_reference(model, case.prompt, ends["later"])
    assert outputs["later"].tokens[: len(reference)] == reference
    assert token not in outputs["later"].tokens[: length + 5]
    assert outputs["length"].tokens == list(case.tokens[:40])
    assert outputs["eos"].finish == outputs["stop"].finish == Finish.STOP
    assert outputs["length"].finish == Finish.LENGTH


def mixed() -> Iterator[SamplingParams]:
    """Requests that want very different things, all reproducible by their seeds."""
    base = SamplingParams(max_tokens=24)
    yield replace(base, seed=1)
    yield replace(base, seed=1, top_p=0.7)
    yield replace(base, seed=2**64 - 1, temperature=1.7)
    yield replace(base, seed=0, top_k=5, frequency_penalty=0.5)
    yield replace(base, seed=7, min_p=0.1, logit_bias={30: 2.0})
    yield replace(base, seed=8, temperature=0.3, repetition_penalty=1.4)
    yield replace(base, temperature=0.0, seed=3)
    yield replace(base, seed=9, logprobs=3, presence_penalty=1.0)


SQUEEZES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few slots": {"expert_slots": 2},
    "preempted": {"kv_cache_tokens": 96},
    "small sweeps": {"max_sweep_tokens": 16, "max_num_seqs": 3},
}


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(
    checkpoint: Checkpoints, golden: Goldens
) -> None:
    prompts = [case.prompt for case in golden(NAME).cases[4:12]]
    requests = [
        Request(str(n), prompt, params)
        for n, (prompt, params) in enumerate(zip(prompts, mixed(), strict=True))
    ]
    alone: dict[str, list[int]] = {}
    with drive.engine(checkpoint(NAME)) as engine:
        for request in requests:
            alone[request.id] = drive.generate(engine, [request])[request.id].tokens
    for squeeze, settings in SQUEEZES.items():
        with drive.engine(checkpoint(NAME), **settings) as engine:
            outputs = drive.generate(engine, requests, every=2)
            assert {id: output.tokens for id, output in outputs.items()} == alone, squeeze
            preemptions = engine.stats().scheduler.preemptions
            assert preemptions > 0 or squeeze != "preempted"


def test_going_on_after_an_engine_that_died(checkpoint: Checkpoints, golden: Goldens) -> None:
    prompt = golden(NAME).cases[9].prompt
    whole = [Request(str(n), prompt, params) for n, params in enumerate(mixed())]
    with drive.engine(checkpoint(NAME)) as engine:
        done = drive.generate(engine, whole)
    rest = [
        replace(request, generated=tuple(done[request.id].tokens[: 3 + 2 * n]))
        for n, request in enumerate(whole)
    ]
    with drive.engine(checkpoint(NAME)) as engine:
        outputs = drive.generate(engine, rest)
    for request in rest:
        output, want = outputs[request.id], done[request.id]
        assert [*request.generated, *output.tokens] == want.tokens
        new = want.logprobs[len(request.generated) :]
        assert [one.token_id for one in output.logprobs] == [one.token_id for one in new]
        assert [one.logprob for one in output.logprobs] == pytest.approx(
            [one.logprob for one in new], abs=1e-4
        )


FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.6},
    "top_k": {"top_k": 4, "temperature": 2.0},
    "top_p": {"top_p": 0.6, "temperature": 1.5},
    "min_p": {"min_p": 0.2, "temperature": 1.5},
}


def filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [vocab] after temperature and filters."""
    probs = (logits.double() / params.temperature).softmax(-1)
    probs[probs < params.min_p * probs.max()] = 0
    ranked, order = probs.sort(descending=True)
    if params.top_k:
        ranked[params.top_k :] = 0
    ranked /= ranked.sum()
    ranked[ranked.cumsum(0) - ranked >= params.top_p] = 0
    kept = torch.zeros_like(probs)
    kept[order] = ranked
    return kept / kept.sum()


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_distribution(
    name: str, model: Any, checkpoint: Checkpoints, golden: Goldens
) -> None:
    prompt = golden(NAME).cases[3].prompt
    draws = 1500
    params = [SamplingParams(max_tokens=1, seed=seed, **FILTERS[name]) for seed in range(draws)]
    with drive.engine(checkpoint(NAME), max_num_queued=1500) as engine:
        requests = [Request(str(n), prompt, one) for n, one in enumerate(params)]
        outputs = drive.generate(engine, requests)
    want = filtered(oracle.forward(model, list(prompt))[-1], params[0])
    found = torch.zeros_like(want)
    for output in outputs.values():
        found[output.tokens[0]] += 1 / draws
    assert not (found > 0)[want < 1e-9].any(), "a filtered token was drawn"
    distance = 0.5 * (found - want).abs().sum().item()  # total variation
    # Expected: sum of sqrt(p (1-p) / (2 pi n)) over tokens; three times that is out of reach.
    expected = (want * (1 - want) / (2 * math.pi * draws)).sqrt().sum().item()
    assert distance < 1.8 * expected + 0.01
