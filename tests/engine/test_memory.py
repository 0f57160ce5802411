"""The memory plan: it never promises more than it was given, and says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moestro.config import Config
from moestro.engine.memory import MIN_ARENA, MIN_STAGING, plan_memory
from moestro.engine.models.registry import load_spec
from moestro.engine.models.spec import ModelSpec
from moestro.errors import ConfigError, OutOfMemory
from moestro.expert_cache.layout import ExpertLayout, gated_layout
from tests.oracle import tiny

MIB = 1 << 20


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("memory") / "model"
    return load_spec(tiny.make(folder, tiny.Spec("qwen3_moe", 1)))


def layout(spec: ModelSpec) -> ExpertLayout:
    return gated_layout(spec.hidden, spec.moe.intermediate, "float32")


def test_everything_is_resident_when_there_is_room(spec: ModelSpec) -> None:
    plan = plan_memory(spec, layout(spec), Config(), 8 << 30)
    assert plan.slots == plan.experts + MIN_STAGING
    assert plan.max_model_len == spec.max_positions
    assert plan.kv_tokens >= 64 * 512
    assert plan.host_entries == MIN_ARENA


@settings(deadline=None, max_examples=120)
@given(
    gpu=st.integers(1 << 10, 64 * MIB),
    slots=st.none() | st.integers(2, 40),
    tokens=st.none() | st.integers(1, 20000),
    length=st.none() | st.integers(1, 512),
    host=st.none() | st.integers(1, 4 * MIB),
    free=st.integers(16 * MIB, 256 * MIB),
)
def test_a_plan_keeps_to_its_limits(
    spec: ModelSpec,
    gpu: int,
    slots: int | None,
    tokens: int | None,
    length: int | None,
    host: int | None,
    free: int,
) -> None:
    assume(gpu <= free)
    config = Config(
        gpu_memory=gpu,
        expert_slots=slots,
        kv_cache_tokens=tokens,
        max_model_len=length,
        host_memory=host,
        max_sweep_tokens=64,
    )
    blob = layout(spec).nbytes
    refusal: OutOfMemory | None
    try:
        plan = plan_memory(spec, layout(spec), config, free)
    except OutOfMemory as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert "bytes" in refusal.message
        assert refusal.param in {"gpu_memory", "kv_cache_tokens", "expert_slots", "host_memory"}
        return
    assert plan.device <= gpu
    assert plan.blocks >= 1
    assert plan.slots >= plan.staging >= MIN_STAGING
    assert plan.max_model_len <= plan.kv_tokens
    if slots is not None:
        assert plan.slots == min(slots, plan.experts + MIN_STAGING)
    if tokens is not None:
        assert plan.blocks == -(-tokens // config.block_size)
    elif length is not None:
        assert plan.max_model_len == length
    if host is not None:
        assert plan.host_bytes <= host
    assert plan.host_bytes == plan.host_entries * blob
    assert plan.host_entries >= MIN_ARENA


def test_what_is_missing_suffices_when_added(spec: ModelSpec) -> None:
    with pytest.raises(OutOfMemory) as caught:
        plan_memory(spec, layout(spec), Config(gpu_memory=100_000), 8 << 30)
    assert caught.value.param == "gpu_memory"
    missing = int(caught.value.message.split(":")[1].split()[0].replace(",", ""))
    plan = plan_memory(spec, layout(spec), Config(gpu_memory=100_000 + missing), 8 << 30)
    assert plan.slots >= MIN_STAGING


@pytest.mark.parametrize(
    ("settings", "param"),
    [({"expert_slots": 1}, "expert_slots"), ({"max_model_len": 513}, "max_model_len")],
)
def test_limits_are_named(spec: ModelSpec, settings: dict[str, int], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_memory(spec, layout(spec), Config(**settings), 8 << 30)
    assert caught.value.param == param
    assert str(next(iter(settings.values()))) in caught.value.message


def test_a_shorter_context_is_noted(spec: ModelSpec) -> None:
    fits = plan_memory(spec, layout(spec), Config(kv_cache_tokens=64), 8 << 30)
    assert fits.max_model_len == 64


def test_the_demo_machine_needs_no_flags(tmp_path: Path) -> None:
    big = tiny.make(tmp_path / "big", tiny.Spec("mixtral", 1, layers=4))
    plan = plan_memory(load_spec(big), layout(load_spec(big)), Config(), 2 << 30)
    assert plan.device <= 1 << 30
