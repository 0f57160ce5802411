"""The engine's turn when something goes wrong: only those concerned end, the others go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.engine.engine import Engine
from moestro.scheduler.plan import DecodePlan
from moestro.types import Finish, SamplingParams
from tests.oracle import drive, tiny
from tests.oracle.drive import generate, greedy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("engine") / "model", tiny.Spec("olmoe", 2))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with drive.engine(model, kv_cache_tokens=1024) as built:
        yield built


def test_a_failing_decode_step_ends_its_rows_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(engine, [greedy("later", range(9), 6)])["later"].tokens
    decode = engine._executor.launch
    calls = 0

    def flaky(plan: DecodePlan) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("a bad day")
        decode(plan)

    monkeypatch.setattr(engine._executor, "launch", flaky)
    with caplog.at_level(logging.CRITICAL, logger="moestro.engine.engine"):
        outputs = generate(engine, [greedy("a", range(5), 20), greedy("b", range(7), 20)])
    assert {out.finish for out in outputs.values()} == {Finish.ERROR}
    assert all("RuntimeError" in (out.error or "") for out in outputs.values())
    assert all("bad day" not in (out.error or "") for out in outputs.values())
    assert generate(engine, [greedy("later", range(9), 6)])["later"].tokens == expected


def test_a_failing_sweep_ends_its_own_sequences(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = generate(engine, [greedy("a", range(5), 30)])["a"].tokens
    engine.add(greedy("a", range(5), 30))
    tokens: list[int] = []
    while len(tokens) < 3:
        tokens += [t for event in engine.step() for t in event.token_ids]
    advance = engine._executor.advance
    failed = False

    def flaky(number: int, enough: Any) -> Any:
        nonlocal failed
        if not failed:
            failed = True
            raise MemoryError
        return advance(number, enough)

    monkeypatch.setattr(engine._executor, "advance", flaky)
    engine.add(greedy("b", range(40), 30))
    finishes: dict[str, Finish] = {}
    while not engine.idle:
        for event in engine.step():
            if event.id == "a":
                tokens += event.token_ids
            if event.finish is not None:
                finishes[event.id] = event.finish
    assert finishes == {"a": Finish.LENGTH, "b": Finish.ERROR}
    assert tokens == alone


@pytest.mark.parametrize("where", ["open", "_results"])
def test_a_sweep_that_fails_at_either_end_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Before its first piece, or after its last: nothing of it stays, and the engine goes on."""
    expected = generate(engine, [greedy("later", range(9), 6)])["later"].tokens

    def broken(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._executor, where, broken)
        assert generate(engine, [greedy("a", range(40), 5)])["a"].finish is Finish.ERROR
    assert not engine._executor.sweeping
    assert generate(engine, [greedy("later", range(9), 6)])["later"].tokens == expected


@pytest.mark.parametrize("where", ["sweep", "decode"])
def test_a_value_that_is_not_finite_fails_one_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The poisoned sequence ends with an error; its blocks are clean for the next one."""
    expected = generate(engine, [greedy("good", range(8), 12)])["good"].tokens
    decoder = engine._executor._decoder
    logits = decoder.logits
    poisoned = False

    def poison(x: torch.Tensor) -> torch.Tensor:
        nonlocal poisoned
        out = logits(x)
        if not poisoned and len(x) == (2 if where == "decode" else 1):
            poisoned = True
            out[-1] = float("nan")
        return out

    monkeypatch.setattr(decoder, "logits", poison)
    wanted = [greedy("good", range(8), 12), greedy("bad", range(3, 30), 12)]
    if where == "sweep":
        outputs = generate(engine, [wanted[1]]) | generate(engine, [wanted[0]])
    else:
        outputs = generate(engine, wanted, every=3)
    assert outputs["bad"].finish is Finish.ERROR
    assert "finite" in (outputs["bad"].error or "")
    assert outputs["good"].tokens == expected


def test_statistics_add_up(engine: Engine) -> None:
    generate(engine, [greedy("a", range(20), 5), greedy("b", range(20), 7)])
    stats = engine.stats()
    assert stats.scheduler.generation_tokens == 12
    assert stats.scheduler.prompt_tokens == 40
    assert stats.scheduler.finished["length"] == 2
    assert stats.experts.hits + stats.experts.misses > 0
    assert sum(stats.step_tokens) > 0
    assert engine.stats().step_tokens == []


def test_a_seed_decides_and_nothing_else_does(engine: Engine) -> None:
    def hot(id: str, seed: int) -> Any:
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
        return drive.Request(id, tuple(range(6)), params)

    alone = generate(engine, [hot("a", 4)])["a"].tokens
    crowd = generate(engine, [hot("x", 1), hot("a", 4), hot("y", 2), greedy("g", range(4), 9)])
    assert crowd["a"].tokens == alone
    assert len({tuple(crowd[id].tokens) for id in "xay"}) == 3
