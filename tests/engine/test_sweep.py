"""Sweeps: their pieces are small, their sum is the whole, and who left writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moestro.config import Config
from moestro.engine import executor as executor_module
from moestro.engine.build import build_engine
from moestro.engine.engine import Engine
from moestro.engine.executor import Executor
from moestro.scheduler.plan import DecodePlan, DecodeRow, Sampled, SweepPlan, SweepRow
from moestro.types import Request, SamplingParams
from tests.oracle import families, tiny

GREEDY = SamplingParams(max_tokens=50, temperature=0.0)


@pytest.fixture(scope="module", params=["grouped", "latent"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with each kind of attention."""
    folder = tmp_path_factory.mktemp("sweep") / "model"
    if request.param == "latent":
        return families.make(folder, families.TINY["deepseek-v2"])
    return tiny.make(folder, tiny.Spec("qwen3_moe", 5))


@pytest.fixture
def make(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], tuple[Engine, Executor]]]:
    engines: list[Engine] = []

    def build(piece: float) -> tuple[Engine, Executor]:
        monkeypatch.setattr(executor_module, "PIECE_FLOPS", piece)
        engine = build_engine(Config(threads=1, kv_cache_tokens=2048), model)
        engines.append(engine)
        return engine, engine._executor

    yield build
    for engine in engines:
        engine.close()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 280, (length,), generator=generator).tolist())


def row(id: str, tokens: tuple[int, ...], first_block: int, start: int = 0) -> SweepRow:
    blocks = tuple(range(first_block, first_block + 16))
    return SweepRow(id, tokens, start, blocks, 0, True)


def finish(executor: Executor, number: int) -> tuple[list[Sampled], int]:
    """Advance one piece a turn; returns the results and how many turns it took."""
    turns = 1
    while (found := executor.advance(number, lambda: True)) is None:
        turns += 1
    return found, turns


def run(executor: Executor, plan: DecodePlan) -> list[Sampled]:
    executor.launch(plan)
    return executor.collect()


def pool(executor: Executor) -> torch.Tensor:
    return executor._kv.pool


def test_any_piece_size_gives_the_same_tokens_and_kv(
    make: Callable[[float], tuple[Engine, Executor]],
) -> None:
    results = []
    for piece in (1e3, 3e5, 1e12):
        _, executor = make(piece)
        for id in "ab":
            executor.add(Request(id, prompt(90), GREEDY))
        plan = SweepPlan(1, (row("a", prompt(90), 0), row("b", prompt(33, 1), 20)))
        executor.open(plan)
        sampled, turns = finish(executor, 1)
        results.append(([(s.id, s.token) for s in sampled], pool(executor).clone(), turns))
    assert results[0][0] == results[1][0] == results[2][0]
    torch.testing.assert_close(results[0][1], results[2][1], rtol=1e-4, atol=1e-5)
    assert results[0][2] > results[1][2] > results[2][2], "smaller pieces, more of them"


def test_a_prompt_in_two_runs_equals_one(make: Callable[[float], tuple[Engine, Executor]]) -> None:
    tokens = prompt(70)
    _, one = make(1e6)
    one.add(Request("a", tokens, GREEDY))
    one.open(SweepPlan(1, (row("a", tokens, 0),)))
    whole, _ = finish(one, 1)
    _, two = make(1e6)
    two.add(Request("a", tokens, GREEDY))
    blocks = tuple(range(16))
    two.open(SweepPlan(1, (SweepRow("a", tokens[:37], 0, blocks, 0, False),)))
    assert finish(two, 1)[0] == []
    two.open(SweepPlan(2, (row("a", tokens[37:], 0, 37),)))
    rest, _ = finish(two, 2)
    assert [s.token for s in rest] == [s.token for s in whole]
    torch.testing.assert_close(pool(two), pool(one), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turns", [0, 1, 2, 7, 20, 60])
def test_a_dropped_sequence_writes_no_kv_and_the_others_go_on(
    make: Callable[[float], tuple[Engine, Executor]], turns: int
) -> None:
    _, solo = make(2e4)
    solo.add(Request("b", prompt(40, 1), GREEDY))
    solo.open(SweepPlan(1, (row("b", prompt(40, 1), 20),)))
    expected, _ = finish(solo, 1)
    _, executor = make(2e4)
    for id in "ab":
        executor.add(Request(id, prompt(40), GREEDY))
    executor.open(SweepPlan(1, (row("a", prompt(60), 0), row("b", prompt(40, 1), 20))))
    for _ in range(turns):
        assert executor.advance(1, lambda: True) is None, "the test wants to drop it midway"
    executor.drop(1, "a")
    others = pool(executor)[:16]
    others.fill_(7.0)  # the blocks belong to somebody else from now on
    sampled, _ = finish(executor, 1)
    assert bool((others == 7.0).all())
    assert [(s.id, s.token) for s in sampled] == [(s.id, s.token) for s in expected]


def test_a_sweep_that_everybody_left_ends(
    make: Callable[[float], tuple[Engine, Executor]],
) -> None:
    _, executor = make(1e4)
    executor.add(Request("a", prompt(50), GREEDY))
    executor.open(SweepPlan(4, (row("a", prompt(50), 0),)))
    executor.advance(4, lambda: True)
    executor.drop(4, "a")
    sampled, turns = finish(executor, 4)
    assert sampled == []
    assert turns < 60
    assert executor.advance(4, lambda: True) == []


def test_decode_steps_between_pieces_change_nothing(
    make: Callable[[float], tuple[Engine, Executor]],
) -> None:
    outcomes = []
    for enough in (lambda: False, lambda: True):
        _, executor = make(5e4)
        for id in "ab":
            executor.add(Request(id, prompt(30), GREEDY))
        executor.open(SweepPlan(1, (row("a", prompt(30), 0),)))
        token = finish(executor, 1)[0][0].token
        executor.open(SweepPlan(2, (row("b", prompt(80, 2), 20),)))
        tokens, found = [token], None
        blocks = tuple(range(16))
        while found is None or len(tokens) < 12:
            if found is None:
                found = executor.advance(2, enough)
            if len(tokens) < 12:
                at = 29 + len(tokens)
                step = DecodePlan((DecodeRow("a", tokens[-1], at, blocks, len(tokens)),))
                tokens.append(run(executor, step)[0].token)
        outcomes.append((tokens, [s.token for s in found]))
    assert outcomes[0] == outcomes[1]
