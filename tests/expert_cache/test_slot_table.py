from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moestro.errors import ConfigError
from moestro.expert_cache.slot_table import FREE, RESERVED, SlotTable

LAYERS, EXPERTS = 3, 4


class SlotTableModel(RuleBasedStateMachine):
    """A dict and three sets do the same as the table."""

    @initialize(cache=st.integers(0, 5), staging=st.integers(0, 3))
    def begin(self, cache: int, staging: int) -> None:
        self.cache = cache
        self.table = SlotTable(LAYERS, EXPERTS, cache + staging, staging)
        self.owned: dict[int, int] = {}  # slot -> key
        self.reserved: set[int] = set()
        self.staged: list[int] = []
        self.ring = list(range(cache, cache + staging))
        self.pins: list[int] = []

    @rule()
    def reserve(self) -> None:
        free = set(range(self.cache)) - self.owned.keys() - self.reserved
        slot = self.table.reserve()
        assert (slot in free) if free else slot is None
        if slot is not None:
            self.reserved.add(slot)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        outside = sorted(set(range(LAYERS * EXPERTS)) - set(self.owned.values()))
        key = data.draw(st.sampled_from(outside))
        self.table.bind(slot, key)
        self.reserved.remove(slot)
        self.owned[slot] = key

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.reserved)))
        self.table.release(slot)
        self.reserved.remove(slot)

    @precondition(lambda self: self.owned.keys() - set(self.pins))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owned.keys() - set(self.pins))))
        assert self.table.evict(slot) == self.owned.pop(slot)
        self.reserved.add(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        self.table.pin(np.array([slot]))
        self.pins.append(slot)
        with pytest.raises(AssertionError):
            self.table.evict(slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.pins))
        self.table.unpin(np.array([slot]))
        self.pins.remove(slot)

    @rule()
    def take_stage(self) -> None:
        slot = self.table.take_stage()
        assert slot == (self.ring.pop(0) if self.ring else None), "the ring is used in order"
        if slot is not None:
            self.staged.append(slot)

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def give_stage(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.staged))
        self.table.give_stage(slot)
        self.staged.remove(slot)
        self.ring.append(slot)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        assert {int(s): int(table.owner[s]) for s in np.flatnonzero(table.owner >= 0)} == self.owned
        for key in range(LAYERS * EXPERTS):
            slot = {k: s for s, k in self.owned.items()}.get(key, FREE)
            assert table.slot_of[key] == table.rows[key // EXPERTS][key % EXPERTS] == slot
        assert set(np.flatnonzero(table.owner == RESERVED)) == self.reserved | set(self.staged)
        assert table.evictable().tolist() == sorted(self.owned.keys() - set(self.pins))
        assert table.free == self.cache - len(self.owned) - len(self.reserved)
        table.check(idle=False)
        if self.reserved or self.staged or self.pins:
            with pytest.raises(AssertionError):
                table.check()
        else:
            table.check()


SlotTableModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSlotTable = SlotTableModel.TestCase


def filled() -> SlotTable:
    table = SlotTable(2, 2, 4, 2)
    for key in (1, 3):
        slot = table.reserve()
        assert slot is not None
        table.bind(slot, key)
    table.check()
    return table


def test_wrong_moves_are_refused() -> None:
    table = filled()
    with pytest.raises(AssertionError, match="not reserved"):
        table.bind(0, 2)
    with pytest.raises(AssertionError, match="not reserved"):
        table.release(0)
    with pytest.raises(AssertionError, match="not for staging"):
        table.give_stage(0)
    with pytest.raises(AssertionError, match="not in use"):
        table.give_stage(2)
    with pytest.raises(AssertionError, match="nothing to evict"):
        table.evict(3)
    table.evict(0)
    with pytest.raises(AssertionError, match="already in slot"):
        table.bind(0, 3)
    stage = table.take_stage()
    assert stage is not None
    with pytest.raises(AssertionError, match="for staging"):
        table.bind(stage, 2)
    with pytest.raises(AssertionError, match="for staging"):
        table.release(stage)


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("slot_of", 1, 1),  # two experts in one slot
        ("slot_of", 1, FREE),  # the owner is not mapped
        ("slot_of", 0, 0),  # mapped, but not the owner
        ("owner", 2, 0),  # a staging slot is owned
        ("owner", 0, FREE),
        ("owner", 0, RESERVED),
        ("pins", 0, 1),
        ("pins", 3, -1),
    ],
)
def test_check_sees_damage(field: str, index: int, value: int) -> None:
    table = filled()
    getattr(table, field)[index] = value
    with pytest.raises(AssertionError):
        table.check()


def test_more_staging_than_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 staging slots do not fit in 2"):
        SlotTable(1, 4, 2, 3)
