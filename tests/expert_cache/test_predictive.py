"""The predictive policy: what it learns, by the CPU's and by the GPU's way of asking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.policy_replay import Pass, PlainLru, best, on_cpu, on_gpu
from moestro.expert_cache.policies import make_policy
from moestro.expert_cache.policies.activation_aware import ActivationAware
from moestro.expert_cache.policies.predictive import Predictive
from moestro.expert_cache.policies.transitions import CELLS, ROWS, Transitions
from moestro.expert_cache.policy import Policy
from moestro.expert_cache.residency import Residency

LAYERS, EXPERTS, TOP, STATES = 4, 32, 2, 16
SHAPE = LAYERS, EXPERTS
SLOTS = LAYERS * EXPERTS // 4
REPLAYS = pytest.mark.parametrize("replay", [on_cpu, on_gpu])


def chains(streams: int, passes: int, seed: int) -> list[Pass]:
    """Sequences that walk a graph of hidden states, each of which has its own experts."""
    law = np.random.default_rng(0)
    experts = np.stack(
        [[law.permutation(EXPERTS)[:TOP] for _ in range(LAYERS)] for _ in range(STATES)]
    )
    follows = law.permutation(STATES)
    random = np.random.default_rng(seed)
    states = random.integers(0, STATES, streams)
    names = [str(number) for number in range(streams)]
    made = []
    for _ in range(passes):
        made.append(Pass("decode", names, experts[states].swapaxes(0, 1), []))
        stray = random.random(streams) < 0.1
        states = np.where(stray, random.integers(0, STATES, streams), follows[states])
    return made


@REPLAYS
def test_it_foresees_what_recency_and_frequency_cannot(replay: object) -> None:
    steps = chains(4, 300, seed=1)
    found = {
        policy.name: replay(SHAPE, steps, SLOTS, policy).warm_hits  # type: ignore[operator]
        for policy in (PlainLru(*SHAPE), make_policy("lru_frequency", *SHAPE), Predictive(*SHAPE))
    }
    bound = best(SHAPE, steps, SLOTS).warm_hits
    base = max(found["plain_lru"], found["lru_frequency"])
    assert base + (bound - base) / 10 < found["predictive"] <= bound


@REPLAYS
def test_chance_costs_it_little(replay: object) -> None:
    """Nothing can be learned from even routing: then it is as good as any fixed set."""
    random = np.random.default_rng(3)
    ids = random.random((120, LAYERS, 4, EXPERTS)).argsort(-1)[..., :TOP]
    steps = [Pass("decode", list("abcd"), one, []) for one in ids]
    counts = replay(SHAPE, steps, SLOTS, Predictive(*SHAPE))  # type: ignore[operator]
    assert counts.warm_hits / (counts.warm_hits + counts.warm_misses) > 0.22  # of 0.25


def test_a_kept_state_is_there_from_the_start(tmp_path: Path) -> None:
    old, new = Predictive(*SHAPE), Predictive(*SHAPE)
    on_cpu(SHAPE, chains(2, 200, seed=1), SLOTS, old)
    old.save(tmp_path / "state")
    new.load(tmp_path / "state")
    steps = chains(2, 40, seed=2)
    fresh = on_cpu(SHAPE, steps, SLOTS, Predictive(*SHAPE))
    kept = on_cpu(SHAPE, steps, SLOTS, new)
    assert kept.hits > fresh.hits


@given(seed=st.integers(0, 99), streams=st.integers(1, 3), late=st.booleans())
@settings(max_examples=5, deadline=None)
def test_the_same_passes_give_the_same_answers(seed: int, streams: int, late: bool) -> None:
    replay = on_gpu if late else on_cpu
    steps = chains(streams, 30, seed)
    one, two = Predictive(*SHAPE), Predictive(*SHAPE)
    assert replay(SHAPE, steps, SLOTS, one) == replay(SHAPE, steps, SLOTS, two)
    every = np.arange(LAYERS * EXPERTS)
    assert one.rank(every, 99).tolist() == two.rank(every, 99).tolist()
    assert one.admits(every, 0, 99).tolist() == two.admits(every, 0, 99).tolist()


def test_prompts_and_missing_ids_are_no_transitions() -> None:
    policy = Predictive(*SHAPE)
    prompt = np.tile([3, 4], (7, 1))
    for clock in range(1, 30):
        for layer in range(LAYERS):
            policy.observe(["a"], layer, prompt, np.zeros(7, np.int64))
            policy.touch(layer, np.array([3, 4]), np.array([7, 7]), None, clock)
    policy.finish("b")
    assert not policy._transitions.state()["seen"].any()
    held = np.array([1, 3])
    assert policy.rank(held, 30).tolist() == [0, 1], "but what prompts use counts"


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (6, 32), (48, 128), (58, 256), (48, 512)])
def test_the_matrix_is_bounded(layers: int, experts: int) -> None:
    matrix = Transitions(layers, experts).state()["transitions"]
    assert matrix.shape[1] == layers * experts
    assert 1 <= len(matrix) <= ROWS
    assert matrix.size <= max(CELLS, layers * experts)


def test_transitions_learn_a_large_shape_within_their_budget() -> None:
    """Few rows are shared and few passes learned from, and what follows is still foreseen."""
    layers, experts = 48, 128
    model = Transitions(layers, experts)
    random = np.random.default_rng(0)
    worlds = random.random((2, layers, 1, experts)).argsort(-1)[..., :4]
    worth = np.array([1.0], np.float32)
    for turn in range(120):
        model.learn(["a"], list(worlds[turn % 2]), worth)
    keys = (worlds[:, :, 0] + np.arange(layers)[:, None] * experts).reshape(2, -1)
    used = np.zeros(layers * experts, np.float32)
    used[keys[0]] = 1.0
    only = np.setdiff1d(keys[1], keys[0])
    never = np.setdiff1d(np.arange(layers * experts), keys)
    expected = model.expect(used)
    assert expected[only].min() > expected[never].max() + 0.1


def test_observing_a_pass_is_observing_its_layers() -> None:
    one, two = ActivationAware(*SHAPE), ActivationAware(*SHAPE)
    ids = np.random.default_rng(1).integers(0, EXPERTS, (LAYERS, 2, TOP))
    one.observe_pass(["a", "b"], ids)
    for layer in range(LAYERS):
        two.observe(["a", "b"], layer, ids[layer], np.arange(2))
    every = np.arange(LAYERS * EXPERTS)
    assert one.rank(every, 1).tolist() == two.rank(every, 1).tolist()


class Told(PlainLru):
    """Counts what it hears."""

    heard = 0

    def touch(self, *about: object) -> None:  # type: ignore[override]
        self.heard += 1


@pytest.mark.parametrize(("slots", "heard"), [(LAYERS * EXPERTS, 0), (LAYERS * EXPERTS - 1, 1)])
def test_where_everything_fits_a_steady_policy_is_left_alone(slots: int, heard: int) -> None:
    policy: Policy = Told(*SHAPE)
    residency = Residency(LAYERS, EXPERTS, slots, 0, policy)
    residency.begin_pass()
    residency.want(0, np.ones(EXPERTS, np.int64), None)
    assert policy.heard == heard  # type: ignore[attr-defined]
