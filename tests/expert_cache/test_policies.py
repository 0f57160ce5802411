"""Laws that hold for every policy, and the particular habits of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import ConfigError
from moestro.expert_cache.policies import POLICIES, make_policy
from moestro.expert_cache.policy import Policy
from moestro.expert_cache.residency import STAGE, Residency

LAYERS, EXPERTS = 3, 5
EVERY = np.arange(LAYERS * EXPERTS)
OPTIONS: dict[str, dict[str, Any]] = {"pinned": {"hot": [0, 6, 11]}}

names = pytest.mark.parametrize("name", POLICIES)

# One pass: for each layer the experts of two sequences, or nothing.
passes = st.lists(
    st.tuples(
        st.sampled_from(["decode", "sweep"]),
        st.lists(
            st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=2, max_size=2), max_size=2),
            min_size=LAYERS,
            max_size=LAYERS,
        ),
    ),
    max_size=12,
)


def make(name: str) -> Policy:
    return make_policy(name, LAYERS, EXPERTS, OPTIONS.get(name))


def feed(policy: Policy, steps: list[Any], clock: int = 0) -> int:
    for _, layers in steps:
        clock += 1
        for layer, rows in enumerate(layers):
            ids = np.array([sorted(row) for row in rows], np.int64).reshape(-1, 2)
            if policy.wants_sequences and len(ids):
                policy.observe(["a", "b"][: len(ids)], layer, ids, np.arange(len(ids)))
            counts = np.bincount(ids.ravel(), minlength=EXPERTS)
            experts = counts.nonzero()[0]
            gates = counts[experts] / (2 * len(ids)) if policy.wants_gates and len(ids) else None
            policy.touch(layer, experts, counts[experts], gates, clock)
    return clock


@names
@given(steps=passes, keys=st.sets(st.integers(0, len(EVERY) - 1)))
@settings(max_examples=25, deadline=None)
def test_rank_is_a_permutation_and_changes_nothing(
    name: str, steps: list[Any], keys: set[int]
) -> None:
    policy = make(name)
    clock = feed(policy, steps)
    some = np.array(sorted(keys), np.int64)
    order = policy.rank(some, clock)
    assert sorted(order.tolist()) == list(range(len(some)))
    assert policy.rank(some, clock).tolist() == order.tolist()


@names
@given(steps=passes)
@settings(max_examples=25, deadline=None)
def test_the_order_of_a_part_is_the_order_of_the_whole(name: str, steps: list[Any]) -> None:
    policy = make(name)
    clock = feed(policy, steps)
    whole = EVERY[policy.rank(EVERY, clock)]
    part = EVERY[::2]
    assert part[policy.rank(part, clock)].tolist() == [key for key in whole if key % 2 == 0]


@names
@given(steps=passes)
@settings(max_examples=25, deadline=None)
def test_the_same_uses_give_the_same_answers(name: str, steps: list[Any]) -> None:
    one, two = make(name), make(name)
    clock = feed(one, steps)
    feed(two, steps)
    assert one.rank(EVERY, clock).tolist() == two.rank(EVERY, clock).tolist()
    pairs = [(key, victim) for key in EVERY.tolist() for victim in EVERY.tolist()[::4]]
    assert [one.admit(k, v, clock) for k, v in pairs] == [two.admit(k, v, clock) for k, v in pairs]


@names
@given(steps=passes)
@settings(max_examples=10, deadline=None)
def test_a_free_slot_is_always_taken(name: str, steps: list[Any]) -> None:
    policy = make(name)
    clock = feed(policy, steps)
    assert all(policy.admit(key, None, clock) for key in EVERY.tolist())


@names
@given(before=passes, after=passes)
@settings(max_examples=15, deadline=None)
def test_what_was_saved_goes_on_as_if_nothing_had_happened(
    name: str, before: list[Any], after: list[Any], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("state") / "policy.npz"
    old, new = make(name), make(name)
    clock = feed(old, before)
    for sequence in ("a", "b"):
        old.finish(sequence)  # what still runs is not saved
    old.save(path)
    new.load(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"
    later = feed(old, after, clock), feed(new, after)
    ranks = [p.rank(EVERY, at).tolist() for p, at in zip((old, new), later, strict=True)]
    assert ranks[0] == ranks[1]


@names
@given(steps=passes, slots=st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_residency_keeps_its_books_and_never_evicts_what_is_in_use(
    name: str, steps: list[Any], slots: int
) -> None:
    residency = Residency(LAYERS, EXPERTS, slots, 0, make(name))
    table = residency.table
    for kind, layers in steps:
        residency.begin_pass(kind)
        for layer, rows in enumerate(layers):
            counts = np.zeros(EXPERTS, np.int64)
            for row in rows:
                counts[sorted(row)] += 1
            wanted, held = residency.want(layer, counts, None)
            hit = held >= 0
            table.pin(held[hit])
            placements = residency.place(layer, wanted[~hit], counts)
            assert sorted(place.expert for place in placements) == wanted[~hit].tolist()
            gone = {place.evicted for place in placements}
            assert gone.isdisjoint((wanted + layer * EXPERTS).tolist())
            for place in placements:
                if place.slot != STAGE:
                    table.bind(place.slot, place.key)
            table.unpin(held[hit])
            table.check()
            assert (table.rows[layer][wanted[hit]] == held[hit]).all()


@names
def test_state_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    make(name).save(path)
    with pytest.raises(ConfigError, match=r"\(3, 5\), not .* for \(3, 6\)"):
        make_policy(name, LAYERS, EXPERTS + 1).load(path)
    other = "lru" if name != "lru" else "lfu"
    with pytest.raises(ConfigError, match=f"holds {name} .* not {other}"):
        make(other).load(path)


@names
def test_a_damaged_or_missing_state_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(ConfigError, match="cannot read"):
        make(name).load(path)
    make(name).save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot read"):
        make(name).load(path)


@names
def test_a_failed_save_leaves_the_old_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    policy = make(name)
    policy.save(path)
    before = path.read_bytes()

    def fail(*args: object, **more: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        policy.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lru'"):
        make_policy("lrru", 1, 1)
    with pytest.raises(ConfigError, match=r"no option 'halflife'; it has \['half_life'\]"):
        make_policy("lfu", 1, 1, {"halflife": 3})
    with pytest.raises(ConfigError, match="it has none"):
        make_policy("lru", 1, 1, {"x": 3})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lfu", {"half_life": 0}, "half_life is 0"),
        ("lru_frequency", {"half_life": -1}, "half_life is -1"),
        ("score", {"beta": -1.0}, "negative"),
        ("activation_aware", {"capacity": 0}, "capacity is 0"),
        ("pinned", {"hot": [99]}, "must lie in"),
        ("pinned", {"hot": [-1]}, "must lie in"),
        ("pinned", {"hot": [1], "size": 2}, "not both"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name, LAYERS, EXPERTS, options)


def touch(policy: Policy, clock: int, *keys: int, gates: list[float] | None = None) -> None:
    for number, key in enumerate(keys):
        layer, expert = divmod(key, EXPERTS)
        gate = np.array([gates[number]]) if gates else None
        policy.touch(layer, np.array([expert]), np.array([1]), gate, clock)


def first(policy: Policy, clock: int, *keys: int) -> int:
    return keys[int(policy.rank(np.array(keys), clock)[0])]


def test_lru_orders_by_last_use_even_within_a_pass() -> None:
    policy = make("lru")
    touch(policy, 1, 4, 9, 2)
    touch(policy, 2, 4)
    assert [first(policy, 2, *keys) for keys in ((4, 9, 2), (4, 2), (4, 0))] == [9, 2, 0]


def test_lfu_prefers_the_frequent_until_it_has_faded() -> None:
    policy = make_policy("lfu", LAYERS, EXPERTS, {"half_life": 2.0})
    for clock in range(1, 5):
        touch(policy, clock, 7)
    touch(policy, 5, 3)
    assert first(policy, 5, 7, 3) == 3
    assert not policy.admit(3, 7, 5)
    assert policy.admit(7, 3, 5)
    touch(policy, 40, 3)
    assert first(policy, 40, 7, 3) == 7
    assert policy.admit(3, 7, 40)


def test_counts_survive_a_very_long_run() -> None:
    policy = make_policy("lfu", LAYERS, EXPERTS, {"half_life": 1.0})
    for clock in (1, 500, 900, 5000, 10**7):
        touch(policy, clock, 3, 7)
        touch(policy, clock, 7)
    assert first(policy, 10**7, 3, 7) == 3
    touch(policy, 10**7 + 1, 3, 3, 3)
    assert first(policy, 10**7 + 1, 3, 7) == 7


def test_lru_frequency_ignores_a_single_use_but_not_a_habit() -> None:
    policy = make("lru_frequency")
    for clock in range(1, 4):
        touch(policy, clock, 1, 2)
    touch(policy, 3, 5)
    touch(policy, 4, 8)
    assert not policy.admit(8, 1, 4), "one use is no reason to displace anybody"
    assert not policy.admit(8, 5, 4), "not even who was used once, and before"
    assert not policy.admit(1, 2, 4), "equals do not exchange places"
    for clock in range(5, 15):
        touch(policy, clock, 8)
    assert policy.admit(8, 1, 14)
    assert first(policy, 14, 2, 1) == 1, "the order itself is by last use"


def test_score_weighs_its_three_terms() -> None:
    options = {"alpha": 0.0, "beta": 0.0, "gamma": 0.0}
    frequent, recent, gated = (
        make_policy("score", LAYERS, EXPERTS, {**options, term: 1.0})
        for term in ("alpha", "beta", "gamma")
    )
    for policy in (frequent, recent, gated):
        touch(policy, 1, 1, 1, 2, gates=[0.1, 0.1, 0.9])
        touch(policy, 2, 3, gates=[0.2])
    assert [first(policy, 2, 1, 2, 3) for policy in (frequent, recent, gated)] == [2, 1, 1]
    assert [first(policy, 2, 1, 2) for policy in (frequent, gated)] == [2, 1]
    assert (gated.wants_gates, frequent.wants_gates) == (True, False)
    assert recent.admit(3, 1, 2)
    assert not recent.admit(1, 3, 2)


def test_pinned_keeps_the_hot_set() -> None:
    policy = make("pinned")
    touch(policy, 1, 0, 6, 11)
    touch(policy, 2, 4, 3)
    assert first(policy, 2, 0, 4, 3, 6) == 4
    assert not policy.admit(4, 6, 2)
    assert policy.admit(0, 6, 2)
    assert policy.admit(3, 4, 2)


def test_pinned_learns_the_hot_set_from_an_earlier_run(tmp_path: Path) -> None:
    policy = make_policy("pinned", LAYERS, EXPERTS, {"size": 2})
    touch(policy, 1, 5, 5, 5, 9, 9, 1)
    assert policy.admit(1, 5, 1), "nothing is hot yet"
    policy.save(tmp_path / "state")
    later = make_policy("pinned", LAYERS, EXPERTS, {"size": 2})
    later.load(tmp_path / "state")
    assert not later.admit(1, 5, 1)
    assert not later.admit(1, 9, 1)
    assert later.admit(9, 1, 1)
