"""The GPU's own way through the engine, with Triton's interpreter in place of a GPU.

Slow, so only a few tokens each: what is checked is that graphs' steps, the device's tables, faults,
rows, sweeps and staging work together. Kernels have their own tests, and tests/gpu the real thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moestro.engine import build
from moestro.engine.gpu.executor import GpuExecutor
from moestro.kernels.cpu_experts import missing
from moestro.scheduler.plan import DecodePlan
from moestro.types import Finish, Grammar, Request, SamplingParams
from tests.models.test_parity import blob, experts
from tests.oracle import drive, tiny
from tests.oracle.golden import Golden
from tests.oracle.interpreter import mend
from tests.oracle.specs import SPECS
from tests.oracle.split import fix_share
from tests.oracle.vocabulary import EOS, FIRST_BYTE

Checkpoints = Callable[[str], Path]
Goldens = Callable[[str], Golden]

# A step that met a fault goes on with whatever the buffers hold; numpy notices.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAME, TOKENS = "qwen3-wide-head", 3


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from moestro.engine.gpu import build as gpu
    from moestro.engine.gpu import product

    mend()

    monkeypatch.setattr(build, "runs_kernels", lambda kind: True)
    monkeypatch.setattr(gpu, "COMPILED", ())
    monkeypatch.setattr(gpu, "PIECES", 1)
    # The kernel for products of few rows has its own tests, and takes nearly all the time here.
    monkeypatch.setattr(product, "serves", lambda *args: False)


def settings(**more: Any) -> dict[str, Any]:
    spec = SPECS[NAME]
    least = min(spec.experts, 2 * spec.top_k)
    return {"max_num_seqs": 2, "max_sweep_tokens": 64, "expert_slots": least + 4} | more


def test_text_is_transformers_with_few_slots_and_half_on_disk(
    checkpoint: Checkpoints, golden: Goldens
) -> None:
    spec = SPECS[NAME]
    host = experts(spec) // 2 * blob(spec)
    cases = sorted(golden(NAME).cases, key=lambda case: len(case.prompt))[:2]
    with drive.engine(checkpoint(NAME), **settings(host_memory=host)) as engine:
        requests = [drive.greedy(f"{n}", case.prompt, TOKENS) for n, case in enumerate(cases)]
        outputs = drive.generate(engine, requests)
        for number, case in enumerate(cases):
            assert tuple(outputs[str(number)].tokens) == case.tokens[:TOKENS]
        drive.settle(engine)
        engine._cache.check(verify_bytes=True)  # type: ignore[call-arg]
        stats = engine.stats().experts
        assert stats.misses > 0
        assert stats.disk.bytes_read > 0


@pytest.mark.skipif(missing() is not None, reason="the CPU's expert kernels are not compiled")
@pytest.mark.parametrize("answers", [True, False])
def test_text_is_transformers_when_the_cpu_computes_half_of_the_misses(
    answers: bool, checkpoint: Checkpoints, golden: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_share(monkeypatch)
    case = min(golden(NAME).cases, key=lambda case: len(case.prompt))
    with drive.engine(checkpoint(NAME), **settings(cpu_experts="on")) as engine:
        cpu = engine._cache.cpu  # type: ignore[union-attr]
        if not answers:
            monkeypatch.setattr("moestro.kernels.gpu.cpu_share.LONGEST_WAIT", 3)
            cpu._pool.pause()
        found = drive.generate(engine, [drive.greedy("a", case.prompt, 2)])["a"]
        cpu._pool.resume()
        assert tuple(found.tokens) == case.tokens[:2]
        drive.settle(engine)
        engine._cache.check(verify_bytes=True)  # type: ignore[call-arg]
        assert (cpu.stalls > 0) is not answers
        assert (engine.stats().experts.computed > 0) is answers


def test_a_prompt_fetches_what_it_foretells(
    checkpoint: Checkpoints, golden: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep too short to touch all experts, in the smallest pieces."""
    from moestro.engine.gpu import sweep

    monkeypatch.setattr(sweep, "ROUTES_TO_TOUCH_ALL", 1000)
    monkeypatch.setattr(sweep, "SCORES_OF_A_PIECE", 1)
    monkeypatch.setattr(sweep, "LEAST_ROWS", 8)
    monkeypatch.setattr(sweep, "ROUTES_OF_A_PIECE", 4)
    spec = SPECS[NAME]
    enough = [case for case in golden(NAME).cases if len(case.prompt) * spec.top_k >= spec.experts]
    case = min(enough, key=lambda case: len(case.prompt))
    with drive.engine(checkpoint(NAME), **settings()) as engine:
        found = drive.generate(engine, [drive.greedy("a", case.prompt, 1)])["a"]
        assert tuple(found.tokens) == case.tokens[:1]
        stats = engine.stats().experts
        assert stats.prefetch_useful > 0
        assert stats.host.bytes_read == (stats.misses + stats.prefetch_wasted) * stats.expert_bytes


@pytest.mark.parametrize("start", [0, 5000])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 40_000])
def test_pieces_of_attention_are_all_rows_in_order(start: int, count: int) -> None:
    from moestro.engine.gpu.sweep import LEAST_ROWS, SCORES_OF_A_PIECE, _row_pieces

    pieces = list(_row_pieces(start, count))
    assert [row for lo, hi in pieces for row in range(lo, hi)] == list(range(count))
    for lo, hi in pieces:
        assert hi - lo <= LEAST_ROWS or (hi - lo) * (start + count) <= SCORES_OF_A_PIECE


def test_pieces_of_experts_are_all_of_them_in_order() -> None:
    from moestro.engine.gpu.sweep import ROUTES_OF_A_PIECE, _route_pieces

    counts = np.random.default_rng(1).integers(0, 20_000, 64)
    experts = np.flatnonzero(counts)
    pieces = _route_pieces(experts, counts)
    assert np.concatenate(pieces).tolist() == experts.tolist()
    assert max(counts[some].sum() for some in pieces) < ROUTES_OF_A_PIECE + 20_000
    assert [len(some) for some in _route_pieces(experts[:0], counts)] == [0]


def test_with_room_for_all_nothing_is_fetched(checkpoint: Checkpoints, golden: Goldens) -> None:
    case = min(golden(NAME).cases, key=lambda case: len(case.prompt))
    with drive.engine(checkpoint(NAME), **settings(expert_slots=None)) as engine:
        found = drive.generate(engine, [drive.greedy("a", case.prompt, TOKENS, logprobs=1)])["a"]
        assert tuple(found.tokens) == case.tokens[:TOKENS]
        logprobs = [one.logprob for one in found.logprobs]
        want = case.logprobs[len(case.prompt) - 1 :][:TOKENS]
        assert logprobs == pytest.approx(list(want), abs=1e-4)
        assert engine.stats().experts.misses == 0


def test_a_grammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is launched before the one before it is read, and its mask comes in time."""
    one_layer = tiny.make(tmp_path / "model", replace(SPECS[NAME], layers=1, experts=4))
    grammar = Grammar("regex", "[a-f][0-9]{2}")
    params = SamplingParams(8, seed=3, eos_token_ids=(EOS,), grammar=grammar)
    unknown: list[int] = []
    launch = GpuExecutor.launch

    def note(self: GpuExecutor, plan: DecodePlan) -> None:
        unknown.extend(row.output_index for row in plan.rows if row.token is None)
        launch(self, plan)

    monkeypatch.setattr(GpuExecutor, "launch", note)
    with drive.engine(one_layer, max_num_seqs=1, max_sweep_tokens=64) as engine:
        found = drive.generate(engine, [Request("a", (5, 6, 7), params)])["a"]
    letter, *digits, end = found.tokens
    assert chr(letter - FIRST_BYTE) in "abcdef"
    assert [chr(digit - FIRST_BYTE).isdecimal() for digit in digits] == [True, True]
    assert (end, found.finish) == (EOS, Finish.STOP)
    assert unknown[:1] == [3], "the output that is EOS"
