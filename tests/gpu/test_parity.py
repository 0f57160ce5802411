"""On a GPU in float32: the text of transformers, whatever is resident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moestro.kernels.cpu_experts import missing
from tests.models.test_parity import assert_greedy_text, blob, experts
from tests.oracle import drive
from tests.oracle.golden import Golden
from tests.oracle.specs import FULL_MATRIX, SPECS
from tests.oracle.split import fix_share

Checkpoints = Callable[[str], Path]
Goldens = Callable[[str], Golden]

GPU: dict[str, Any] = {"device": "cuda", "max_num_seqs": 4, "max_sweep_tokens": 512}


def starved(name: str, **more: Any) -> dict[str, Any]:
    """About a quarter of the experts resident, at least what one layer of a step may need."""
    spec = SPECS[name]
    least = min(spec.experts, GPU["max_num_seqs"] * spec.top_k)
    return GPU | {"expert_slots": max(experts(spec) // 4, least) + 3} | more


@pytest.mark.parametrize("name", SPECS)
def test_roomy(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name), **GPU) as engine:
        assert_greedy_text(engine, golden(name))


@pytest.mark.parametrize("name", SPECS)
def test_starved(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name), **starved(name)) as engine:
        stats = assert_greedy_text(engine, golden(name))
        assert stats.experts.misses > 0


@pytest.mark.parametrize("name", FULL_MATRIX)
def test_one_at_a_time(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name), **starved(name, max_num_seqs=1)) as engine:
        assert_greedy_text(engine, golden(name))


@pytest.mark.parametrize("name", FULL_MATRIX)
def test_half_in_the_arena_and_the_rest_on_disk(
    name: str, checkpoint: Checkpoints, golden: Goldens
) -> None:
    host = experts(SPECS[name]) // 2 * blob(SPECS[name])
    with drive.engine(checkpoint(name), **starved(name, host_memory=host)) as engine:
        stats = assert_greedy_text(engine, golden(name))
        assert stats.experts.disk.bytes_read > 0


@pytest.mark.parametrize("name", FULL_MATRIX)
def test_preemption(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    longest = max(len(case.prompt) for case in golden(name).cases) + 64
    with drive.engine(checkpoint(name), **starved(name, kv_cache_tokens=longest + 32)) as engine:
        stats = assert_greedy_text(engine, golden(name))
        assert stats.scheduler.preemptions > 0


@pytest.mark.parametrize("name", FULL_MATRIX)
def test_arriving_while_others_decode(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name), **starved(name)) as engine:
        assert_greedy_text(engine, golden(name), every=7)


@pytest.mark.skipif(missing() is not None, reason="the CPU's expert kernels are not compiled")
@pytest.mark.parametrize("name", FULL_MATRIX)
def test_half_of_the_misses_on_the_cpu(
    name: str, checkpoint: Checkpoints, golden: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_share(monkeypatch)
    with drive.engine(checkpoint(name), **starved(name, cpu_experts="on")) as engine:
        stats = assert_greedy_text(engine, golden(name))
        assert stats.experts.computed > 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "score", "activation_aware"])
def test_policies(policy: str, checkpoint: Checkpoints, golden: Goldens, tmp_path: Path) -> None:
    more: dict[str, Any] = {"expert_policy": policy}
    if policy == "activation_aware":
        more["expert_policy_state"] = tmp_path / "state"
    with drive.engine(checkpoint("qwen3"), **starved("qwen3", **more)) as engine:
        assert_greedy_text(engine, golden("qwen3"))
