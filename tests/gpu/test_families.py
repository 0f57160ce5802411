"""On a GPU every family gives transformers' text in float32, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.engine.gpu.blocks import missing_blocks
from moestro.engine.models.registry import load_spec
from moestro.engine.models.spec import ModelSpec
from moestro.errors import ModelError
from moestro.expert_cache.layout import gated_layout
from moestro.types import Request, SamplingParams
from tests.gpu.test_parity import GPU
from tests.models.test_families import WITHIN, Oracle, assert_text, oracle
from tests.oracle import drive, families

__all__ = ["oracle"]  # the fixture

Oracles = Callable[[str], Oracle]


def served(oracle: Oracles, name: str) -> tuple[Oracle, ModelSpec]:
    """The oracle of a family that runs on a GPU; the test is over when it is refused instead."""
    found = oracle(name)
    spec = load_spec(found.folder)
    lacking = missing_blocks(spec)
    if not lacking:
        return found, spec
    with (
        pytest.raises(ModelError, match="--device cpu") as caught,
        drive.engine(found.folder, **GPU),
    ):
        pass
    assert all(block in str(caught.value) for block in lacking)
    pytest.skip(f"refused, lacking {', '.join(lacking)}")


def starved(spec: ModelSpec, **more: Any) -> dict[str, Any]:
    """At least what one layer of a step may need, and little more."""
    least = min(spec.moe.experts, GPU["max_num_seqs"] * spec.moe.top_k)
    return GPU | {"expert_slots": least + 3} | more


every = pytest.mark.parametrize("name", families.TINY)


@every
def test_roomy_and_again_with_warm_prefixes(name: str, oracle: Oracles) -> None:
    found, _ = served(oracle, name)
    with drive.engine(found.folder, **GPU) as engine:
        cold = assert_text(engine, found.cases)
        warm = assert_text(engine, found.cases, each=2).kv.prefix_hits - cold.kv.prefix_hits
        assert warm > 0


@every
def test_one_at_a_time(name: str, oracle: Oracles) -> None:
    found, spec = served(oracle, name)
    with drive.engine(found.folder, **starved(spec, max_num_seqs=1)) as engine:
        assert_text(engine, found.cases[::2])


@every
def test_starved_with_half_on_disk_and_little_kv(name: str, oracle: Oracles) -> None:
    found, spec = served(oracle, name)
    blob = gated_layout(spec.hidden, spec.moe.intermediate, "float32").nbytes
    half = len(spec.moe_layers) * spec.moe.experts // 2 * blob
    longest = max(len(case.prompt) for case in found.cases) + 64
    scarce = starved(spec, host_memory=half, kv_cache_tokens=longest + 32, max_sweep_tokens=40)
    with drive.engine(found.folder, **scarce) as engine:
        stats = assert_text(engine, found.cases)
        assert stats.scheduler.preemptions > 0
        assert stats.experts.misses > 0
        assert stats.experts.disk.bytes_read > 0


def logprobs(folder: Path, tokens: tuple[int, ...], **settings: Any) -> torch.Tensor:
    """Of every token of a prompt but the first."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with drive.engine(folder, **GPU | settings) as engine:
        found = drive.generate(engine, [Request("a", tokens, sampling)])["a"].prompt_logprobs
    assert found is not None
    return torch.tensor([one.logprob for one in found[1:] if one is not None])


@every
def test_logprobs_of_the_whole_text(name: str, oracle: Oracles) -> None:
    found, _ = served(oracle, name)
    case = found.cases[-1]
    got = logprobs(found.folder, case.prompt + case.tokens)
    torch.testing.assert_close(got, torch.tensor(case.logprobs), rtol=0, atol=WITHIN)


@every
def test_bfloat16_is_near(name: str, oracle: Oracles) -> None:
    """As on the CPU: routers flip now and then, which moves single tokens far."""
    found, _ = served(oracle, name)
    case = found.cases[-1]
    got = logprobs(found.folder, case.prompt + case.tokens, dtype="bfloat16")
    assert float((got - torch.tensor(case.logprobs)).abs().median()) < 0.25
