from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moestro.expert_cache.policies.activation_aware import ActivationAware

LAYERS, EXPERTS = 4, 6
EVERY = np.arange(LAYERS * EXPERTS)


def run(policy: ActivationAware, sequence: str, *experts: int, layers: int = LAYERS) -> None:
    for layer in range(layers):
        policy.observe([sequence], layer, np.array([experts]), np.array([0]))


def leaves_first(policy: ActivationAware, clock: int, *keys: int) -> list[int]:
    some = np.array(keys)
    return some[policy.rank(some, clock)].tolist()


def learned(capacity: int = 4) -> ActivationAware:
    policy = ActivationAware(LAYERS, EXPERTS, capacity=capacity)
    for name, experts in (("x", (0, 1)), ("y", (2, 3)), ("z", (4, 5))):
        run(policy, name, *experts)
        policy.finish(name)
    return policy


def test_predicts_what_the_nearest_past_sequence_used() -> None:
    policy = learned()
    run(policy, "now", 3, 0, 3, layers=1)  # mostly like y
    last = LAYERS - 1  # of the last layer nothing has been seen yet
    order = leaves_first(policy, 1, *(last * EXPERTS + expert for expert in range(EXPERTS)))
    assert sorted(order[-2:]) == [last * EXPERTS + 2, last * EXPERTS + 3]


def test_later_layers_leave_first() -> None:
    policy = learned()
    run(policy, "now", 3, 3)
    assert leaves_first(policy, 1, 3, EXPERTS + 3, 2 * EXPERTS + 3) == [
        2 * EXPERTS + 3,
        EXPERTS + 3,
        3,
    ]
    nothing = ActivationAware(LAYERS, EXPERTS)
    assert leaves_first(nothing, 1, 0, 3 * EXPERTS, EXPERTS) == [3 * EXPERTS, EXPERTS, 0]


def test_a_weight_of_one_layer_in_four() -> None:
    """Predicted activation x (1 - layer / layers): half as active, four times as near."""
    policy = ActivationAware(LAYERS, EXPERTS)
    policy.observe(["x"], 0, np.array([[0, 1, 1]]), np.array([0]))
    policy.observe(["x"], 3, np.array([[0, 1, 1]]), np.array([0]))
    # layer 0: shares 1/3, 2/3 times 1; layer 3: shares 1/3, 2/3 times 1/4
    keys = (0, 1, 3 * EXPERTS, 3 * EXPERTS + 1)
    assert leaves_first(policy, 1, *keys) == [3 * EXPERTS, 3 * EXPERTS + 1, 0, 1]


def test_every_running_sequence_counts() -> None:
    policy = learned()
    policy.observe(["a", "b"], 0, np.array([[0, 1], [2, 3], [2, 3]]), np.array([0, 1, 1]))
    order = leaves_first(policy, 1, *range(EXPERTS))
    assert order[:2] == [4, 5]
    policy.finish("b")
    assert sorted(leaves_first(policy, 2, *range(EXPERTS))[-2:]) == [0, 1]


def test_without_a_past_sequences_predict_themselves() -> None:
    policy = ActivationAware(LAYERS, EXPERTS)
    run(policy, "now", 5, 2)
    assert sorted(leaves_first(policy, 1, *range(EXPERTS))[-2:]) == [2, 5]


def test_a_full_collection_replaces_the_nearest() -> None:
    policy = learned(capacity=3)
    run(policy, "x2", 0, 1, 1)  # nearest to x
    policy.finish("x2")
    assert policy._kept == 3
    first = policy._past[:, 0] > 0
    assert first.tolist() == [True, False, False]
    assert policy._past[0, 1] > policy._past[0, 0], "x was replaced by x2"
    assert np.allclose(np.linalg.norm(policy._past, axis=1), 1)


def test_finishing_twice_or_unseen_is_harmless() -> None:
    policy = learned()
    policy.finish("x")
    policy.finish("nobody")
    assert policy._kept == 3


def test_prediction_is_made_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = learned()
    made = []
    predict = policy._predict
    monkeypatch.setattr(policy, "_predict", lambda: made.append(1) or predict())
    for clock in (1, 1, 1, 2, 2):
        policy.rank(EVERY, clock)
    assert len(made) == 2


def test_running_sequences_are_bounded() -> None:
    policy = ActivationAware(1, EXPERTS, capacity=1)
    for number in range(3000):
        run(policy, str(number), 1, layers=1)
    assert len(policy._running) <= 1024
    assert "2999" in policy._running


def test_the_collection_survives_a_restart(tmp_path: Path) -> None:
    learned().save(tmp_path / "past")
    policy = ActivationAware(LAYERS, EXPERTS, capacity=2)
    policy.load(tmp_path / "past")
    assert policy._kept == 2, "the first `capacity` of three"
    run(policy, "now", 3, 0, 3, layers=1)
    assert sorted(leaves_first(policy, 1, *range(EXPERTS))[-2:]) == [2, 3]


def test_at_the_start_all_of_the_recorded_past_predicts(tmp_path: Path) -> None:
    before = ActivationAware(LAYERS, EXPERTS)
    for number in range(3):
        run(before, f"often {number}", 4, 5)
        before.finish(f"often {number}")
    run(before, "once", 1)
    before.finish("once")
    before.save(tmp_path / "state")
    policy = ActivationAware(LAYERS, EXPERTS)
    policy.load(tmp_path / "state")
    first = EVERY[policy.rank(EVERY, 0)][::-1].tolist()  # the most worth having first
    assert set(first[:2]) == {4, 5}, "of the first layer, both used three times"
    assert first.index(1) < first.index(0)
    assert first.index(EXPERTS + 4) < first.index(EXPERTS + 1) < first.index(EXPERTS)
