"""What a GPU's next step may do to the slots, and the replay of that for the policy study."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.policy_replay import _Device
from moestro.expert_cache.policies import POLICIES, make_policy
from moestro.expert_cache.residency import Residency
from moestro.expert_cache.slot_table import FREE
from moestro.expert_cache.victims import Victims
from moestro.kernels.reference_tables import Tables, acquire

LAYERS, EXPERTS, TOP = 2, 6, 2
KEYS = LAYERS * EXPERTS


@given(
    name=st.sampled_from(sorted(set(POLICIES) - {"pinned"})),
    slots=st.integers(1, KEYS),
    held=st.lists(st.integers(0, KEYS - 1), unique=True, max_size=KEYS),
    passes=st.lists(st.lists(st.integers(0, KEYS - 1), min_size=1, unique=True), max_size=4),
    kept=st.integers(0, 4),
)
@settings(max_examples=30, deadline=None)
def test_every_slot_is_listed_once_and_those_of_a_step_under_way_last(
    name: str, slots: int, held: list[int], passes: list[list[int]], kept: int
) -> None:
    residency = Residency(LAYERS, EXPERTS, slots, 0, make_policy(name, LAYERS, EXPERTS))
    victims = Victims(residency)
    held = held[:slots]
    residency.table.replace(np.array(held, np.int64), np.arange(len(held)))
    for used in passes:
        residency.begin_pass()
        residency.want_all(np.bincount(used, minlength=KEYS))
    first, admit = victims.lists(kept, kept)
    assert sorted(first.tolist()) == list(range(slots))
    assert len(admit) == KEYS
    free = (residency.table.owner[first] == FREE).tolist()
    assert free == sorted(free, reverse=True), "free slots come first"
    count = min(slots, kept + 1)
    again, _ = victims.lists(kept, kept)
    if count < slots:
        assert set(again[-count:].tolist()) <= set(first[: kept + 2].tolist())
    victims.settle()
    assert victims.lists(kept, kept)[0].tolist() == first.tolist()


@given(
    ids=st.lists(
        st.lists(
            st.lists(st.integers(0, EXPERTS - 1), min_size=TOP, max_size=TOP),
            min_size=1,
            max_size=3,
        ),
        min_size=LAYERS,
        max_size=LAYERS,
    ),
    order=st.permutations(range(4)),
    admit=st.lists(st.booleans(), min_size=KEYS, max_size=KEYS),
    held=st.lists(st.integers(0, KEYS - 1), unique=True, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_the_replay_takes_slots_as_the_kernel_does(
    ids: list[list[list[int]]], order: list[int], admit: list[bool], held: list[int]
) -> None:
    slot_of = [FREE] * KEYS
    owner = held + [FREE] * (4 - len(held))
    for slot, key in enumerate(held):
        slot_of[key] = slot
    tables = Tables(slot_of, owner, [1] * KEYS, admit, order, ring=KEYS, experts=EXPERTS)
    device = _Device((LAYERS, EXPERTS), 4)
    device.slot_of[:], device.owner = slot_of, list(owner)
    for layer in range(LAYERS):
        acquire(layer, [expert for row in ids[layer] for expert in row], tables)
    width = max(len(rows) for rows in ids)  # the replay has as many rows in each layer
    routed = np.array([rows + rows[:1] * (width - len(rows)) for rows in ids])
    device.step(routed, order, admit)
    assert device.slot_of.tolist() == tables.slot_of
    assert device.owner == tables.owner
