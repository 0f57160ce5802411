"""The GPU's own way through the engine, with Triton's interpreter in place of a GPU.

Slow, so only a few tokens each: what is checked is that graphs' steps, the device's tables, faults,
rows, sweeps and staging work together. Kernels have their own tests, and tests/gpu the real thing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moestro.engine import build
from tests.models.test_parity import blob, experts
from tests.oracle import drive
from tests.oracle.golden import Golden
from tests.oracle.interpreter import mend
from tests.oracle.specs import SPECS

Checkpoints = Callable[[str], Path]
Goldens = Callable[[str], Golden]

# A step that met a fault goes on with whatever the buffers hold; numpy notices.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAME, TOKENS = "qwen3-wide-head", 4


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from moestro.engine.gpu import build as gpu

    mend()

    monkeypatch.setattr(build, "runs_kernels", lambda kind: True)
    monkeypatch.setattr(gpu, "COMPILED", ())
    monkeypatch.setattr(gpu, "PIECES", 1)


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


def test_with_room_for_all_nothing_is_fetched(checkpoint: Checkpoints, golden: Goldens) -> None:
    case = min(golden(NAME).cases, key=lambda case: len(case.prompt))
    with drive.engine(checkpoint(NAME), **settings(expert_slots=None)) as engine:
        found = drive.generate(engine, [drive.greedy("a", case.prompt, TOKENS, logprobs=1)])["a"]
        assert tuple(found.tokens) == case.tokens[:TOKENS]
        logprobs = [one.logprob for one in found.logprobs]
        want = case.logprobs[len(case.prompt) - 1 :][:TOKENS]
        assert logprobs == pytest.approx(list(want), abs=1e-4)
        assert engine.stats().experts.misses == 0
