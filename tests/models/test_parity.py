"""Greedy text equals transformers' in float32, token for token, however the engine is squeezed.

Each case also asserts that the squeeze happened: a parity test whose engine never preempted,
evicted or read from the disk would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moestro.engine.engine import Engine
from moestro.expert_cache.layout import gated_layout
from moestro.stats import EngineStats
from moestro.types import Finish
from tests.oracle import drive, specs
from tests.oracle.golden import NEW_TOKENS, Golden
from tests.oracle.tiny import Spec

Checkpoints = Callable[[str], Path]
Goldens = Callable[[str], Golden]

FEWEST_SLOTS = 2
POLICIES = ("predictive", "lru", "lfu", "lru_frequency", "score", "activation_aware")

every_checkpoint = pytest.mark.parametrize("name", specs.SPECS)
one_per_family = pytest.mark.parametrize("name", specs.FULL_MATRIX)


def assert_greedy_text(engine: Engine, golden: Golden, *, every: int | None = None) -> EngineStats:
    """Run every golden prompt and compare. Returns the statistics afterwards."""
    requests = [
        drive.greedy(str(number), case.prompt, NEW_TOKENS)
        for number, case in enumerate(golden.cases)
    ]
    outputs = drive.generate(engine, requests, every=every)
    for number, case in enumerate(golden.cases):
        output = outputs[str(number)]
        assert tuple(output.tokens) == case.tokens, f"prompt {number}"
        assert (output.finish, output.error) == (Finish.LENGTH, None)
    drive.settle(engine)
    return engine.stats()


def experts(spec: Spec) -> int:
    """Experts of all layers together."""
    return spec.experts * sum(map(spec.is_sparse, range(spec.layers)))


def blob(spec: Spec) -> int:
    """Bytes of one expert in memory."""
    return gated_layout(spec.hidden, spec.intermediate, "float32").nbytes


@every_checkpoint
def test_all_at_once(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name)) as engine:
        stats = assert_greedy_text(engine, golden(name))
        assert stats.scheduler.preemptions == 0
        assert stats.experts.evictions == 0  # room for every expert: the other cases differ


@every_checkpoint
def test_one_at_a_time(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name), max_num_seqs=1) as engine:
        stats = assert_greedy_text(engine, golden(name))
        decoded = len(golden(name).cases) * (NEW_TOKENS - 1)
        assert stats.scheduler.decode_steps == decoded  # never two in a step


@every_checkpoint
def test_fewest_slots(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name), expert_slots=FEWEST_SLOTS) as engine:
        stats = assert_greedy_text(engine, golden(name))
        assert stats.experts.misses > 100
        assert stats.experts.slots.resident <= FEWEST_SLOTS


@every_checkpoint
def test_preemption(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    longest = max(len(case.prompt) for case in golden(name).cases) + NEW_TOKENS
    with drive.engine(checkpoint(name), kv_cache_tokens=longest + 32) as engine:
        stats = assert_greedy_text(engine, golden(name))
        assert stats.scheduler.preemptions > 0


@every_checkpoint
def test_warm_prefixes(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name)) as engine:
        cold = assert_greedy_text(engine, golden(name)).kv.prefix_hits
        warm = assert_greedy_text(engine, golden(name)).kv.prefix_hits - cold
        whole_blocks = sum((len(case.prompt) - 1) // 16 * 16 for case in golden(name).cases)
        assert warm == whole_blocks


@every_checkpoint
def test_a_quarter_in_the_arena_and_the_rest_on_disk(
    name: str, checkpoint: Checkpoints, golden: Goldens
) -> None:
    spec = specs.SPECS[name]
    arena = max(4, experts(spec) // 4)  # experts
    few: dict[str, Any] = {"host_memory": arena * blob(spec), "expert_slots": FEWEST_SLOTS + 1}
    with drive.engine(checkpoint(name), **few) as engine:
        before = engine.stats().experts.disk.bytes_read
        stats = assert_greedy_text(engine, golden(name))
        assert stats.experts.host.capacity == arena
        assert stats.experts.host.resident <= arena
        assert stats.experts.disk.bytes_read - before > experts(spec) * blob(spec)


@one_per_family
@pytest.mark.parametrize("policy", POLICIES)
def test_policies(
    name: str, policy: str, checkpoint: Checkpoints, golden: Goldens, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"expert_policy": policy}
    if policy == "activation_aware":
        settings["expert_policy_state"] = tmp_path / "learnt"
    third = experts(specs.SPECS[name]) // 3
    with drive.engine(checkpoint(name), expert_slots=third, **settings) as engine:
        stats = assert_greedy_text(engine, golden(name), every=5)
        assert stats.experts.policy == policy
        assert stats.experts.evictions > 0
        assert stats.experts.hits > 0


@one_per_family
def test_arriving_while_others_decode(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name)) as engine:
        stats = assert_greedy_text(engine, golden(name), every=3)
        assert stats.scheduler.sweeps > 8


@one_per_family
def test_prompts_longer_than_a_sweep(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    window = 24  # tokens; not a multiple of the block
    with drive.engine(checkpoint(name), max_sweep_tokens=window) as engine:
        stats = assert_greedy_text(engine, golden(name), every=2)
        swept = stats.scheduler.swept_tokens
        assert stats.scheduler.sweeps >= swept / window


@one_per_family
def test_everything_at_once_is_scarce(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    spec = specs.SPECS[name]
    scarce: dict[str, Any] = {
        "kv_cache_tokens": 296,
        "max_sweep_tokens": 40,
        "expert_slots": 5,
        "host_memory": 6 * blob(spec),
        "max_num_seqs": 7,
        "block_size": 8,
    }
    with drive.engine(checkpoint(name), **scarce) as engine:
        for _ in range(2):  # the second time prefixes are warm, as far as they survived
            stats = assert_greedy_text(engine, golden(name), every=2)
        assert stats.scheduler.preemptions > 0
        assert stats.experts.disk.bytes_read > 0


@one_per_family
def test_without_prefix_reuse(name: str, checkpoint: Checkpoints, golden: Goldens) -> None:
    with drive.engine(checkpoint(name), enable_prefix_caching=False) as engine:
        for _ in range(2):
            stats = assert_greedy_text(engine, golden(name))
        assert stats.kv.prefix_hits == 0
        assert stats.kv.blocks_cached == 0


def continuations(
    engine: Engine, prompts: Sequence[Sequence[int]], salts: Sequence[str | None]
) -> list[list[float]]:
    """Log-probabilities of 8 greedy tokens after each prompt, one prompt after the other."""
    found = []
    for number, (prompt, salt) in enumerate(zip(prompts, salts, strict=True)):
        request = replace(drive.greedy(str(number), prompt, 8, logprobs=1), cache_salt=salt)
        output = drive.generate(engine, [request])[request.id]
        found.append([one.logprob for one in output.logprobs])
    return found


@one_per_family
def test_blocks_are_reused_only_after_the_same_past(
    name: str, checkpoint: Checkpoints, golden: Goldens
) -> None:
    long = golden(name).cases[-1].prompt
    first, other, common = long[:16], long[16:32], long[32:72]
    prompts = [first + common, other + common, first + other + common, first + common]
    salts = [None, None, None, "mine"]
    with drive.engine(checkpoint(name), enable_prefix_caching=False) as engine:
        want = continuations(engine, prompts, salts)
    with drive.engine(checkpoint(name)) as engine:
        found = continuations(engine, prompts, salts)
        assert engine.stats().kv.prefix_hits == 16  # the third begins like the first
    assert found[0] == pytest.approx(found[3], abs=1e-4)
    for one, same in zip(found, want, strict=True):
        assert one == pytest.approx(same, abs=1e-4)


def test_a_prompt_that_leaves_writes_nothing_more(checkpoint: Checkpoints, golden: Goldens) -> None:
    cases = golden("qwen3").cases
    stays, comes = cases[5], cases[-1]
    leaver = drive.greedy("leaver", comes.prompt[::-1] + comes.prompt[:80], 1)
    # The pool holds little more than the leaver and its companion: the newcomer takes its blocks
    # while the sweep that both were in goes on.
    tight: dict[str, Any] = {"kv_cache_tokens": 336, "enable_prefix_caching": False}
    with drive.engine(checkpoint("qwen3"), **tight) as engine:
        for pieces in range(1, 24, 2):
            companion = drive.greedy("stays", stays.prompt, 8)
            engine.add(companion)
            engine.add(leaver)
            for _ in range(pieces):
                assert engine.step(lambda: True) == []
            engine.abort("leaver")
            newcomer = drive.greedy("comes", comes.prompt, 8)
            outputs = drive.generate(engine, [newcomer], running=[companion], hurried=True)
            assert tuple(outputs["comes"].tokens) == comes.tokens[:8], f"after {pieces} pieces"
            assert tuple(outputs["stays"].tokens) == stays.tokens[:8], f"after {pieces} pieces"
            drive.settle(engine)
        assert engine.stats().scheduler.finished["abort"] == 12


def test_a_twin_reuses_only_what_is_computed(checkpoint: Checkpoints, golden: Goldens) -> None:
    case = golden("qwen3").cases[-1]
    hits = set()
    for pieces in range(1, 90, 8):  # the prompt takes five sweeps; its twin comes at some point
        with drive.engine(checkpoint("qwen3"), max_sweep_tokens=44) as engine:
            first, twin = (drive.greedy(id, case.prompt, 8) for id in ("first", "twin"))
            engine.add(first)
            for _ in range(pieces):
                assert engine.step(lambda: True) == []
            outputs = drive.generate(engine, [twin], running=[first], hurried=True)
            for output in outputs.values():
                assert tuple(output.tokens) == case.tokens[:8], f"after {pieces} pieces"
            hits.add(engine.stats().kv.prefix_hits)
    assert hits - {0}, "the twin never reused anything"
