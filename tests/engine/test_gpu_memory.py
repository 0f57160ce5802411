"""The memory plan of a GPU, by arithmetic: nothing is allocated."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu_shapes import SHAPES
from moestro.config import Config
from moestro.engine.gpu.memory import OUTSIDE, gpu_workspace_bytes, plan_gpu_memory
from moestro.engine.memory import MemoryPlan
from moestro.engine.models.registry import load_spec
from moestro.engine.models.spec import ModelSpec
from moestro.errors import ConfigError, OutOfMemory
from moestro.expert_cache.layout import gated_layout
from moestro.expert_cache.stream import GROUPS

GIB = 1 << 30
EVERY = 48 * 128


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Qwen3-30B-A3B, of which only the config exists."""
    return load_spec(SHAPES["qwen3"].write_config(tmp_path_factory.mktemp("shape")))


def plan(spec: ModelSpec, free: int, host: int = 100 * GIB, **settings: Any) -> MemoryPlan:
    layout = gated_layout(spec.hidden, spec.moe.intermediate, "bfloat16")
    config = Config(device="cuda", **settings)
    return plan_gpu_memory(spec, layout, config, free, host)


def test_a_12_gb_card_gets_all_of_its_budget_and_no_more(spec: ModelSpec) -> None:
    found = plan(spec, 12 * GIB, max_model_len=8192, max_num_seqs=16, max_sweep_tokens=2048)
    assert found.device <= 12 * GIB
    assert found.device > 11 * GIB
    assert 0 < found.ring <= 128
    assert found.staging % GROUPS == 0
    assert found.slots - found.ring - found.staging > found.slots * 0.7
    assert found.host_entries == pytest.approx(50 * GIB / found.slots_bytes * found.slots, rel=0.01)


def test_with_room_for_all_nothing_is_set_apart(spec: ModelSpec) -> None:
    found = plan(spec, 140 * GIB)
    assert (found.slots, found.ring, found.staging) == (EVERY, 0, 0)
    assert found.host_entries == 64  # passed through while loading


def test_the_budget_is_the_flag_and_never_more_than_is_free(spec: ModelSpec) -> None:
    small = plan(spec, 140 * GIB, gpu_memory=16 * GIB, max_model_len=8192)
    assert 15 * GIB < small.device <= 16 * GIB
    with pytest.raises(OutOfMemory, match="--gpu-memory is"):
        plan(spec, 8 * GIB, gpu_memory=16 * GIB)
    with pytest.raises(OutOfMemory, match="bytes"):
        plan(spec, 3 * GIB)


def test_too_few_slots_for_a_layer_are_refused(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"100 expert slots.*128 experts.*--max-num-seqs"):
        plan(spec, 80 * GIB, expert_slots=100)
    assert plan(spec, 80 * GIB, expert_slots=100, max_num_seqs=8).slots == 100


def test_workspace_grows_with_the_window(spec: ModelSpec) -> None:
    small, large = (
        gpu_workspace_bytes(spec, Config(max_sweep_tokens=tokens), 2) for tokens in (1024, 8192)
    )
    assert OUTSIDE < small < large < 3 * GIB
