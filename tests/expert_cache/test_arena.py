from __future__ import annotations

import numpy as np
import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moestro.errors import ConfigError
from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.arena_table import ArenaTable
from moestro.expert_cache.layout import gated_layout
from tests.expert_cache.fakes import LAYOUT

KEYS = range(6)


class ArenaModel(RuleBasedStateMachine):
    """A list in order of use does the same as the table."""

    @initialize(capacity=st.integers(1, 5))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.table = ArenaTable(capacity)
        self.entries: dict[int, int] = {}
        self.idle: list[int] = []  # unleased keys, least recently used first
        self.leases: list[tuple[int, bool]] = []
        self.in_slots: set[int] = set()

    @rule(key=st.sampled_from(KEYS))
    def lease(self, key: int) -> None:
        held = key in self.entries
        claim = self.table.lease(key)
        if not held and len(self.entries) == self.capacity:
            if not self.idle:
                assert claim is None
                return
            redundant = [k for k in self.idle if k in self.in_slots]
            victim = (redundant or self.idle)[0]
            self.idle.remove(victim)
            del self.entries[victim]
        assert claim is not None
        assert claim.filled == held
        assert self.entries.get(key, claim.entry) == claim.entry
        assert claim.entry not in {e for k, e in self.entries.items() if k != key}
        self.entries[key] = claim.entry
        if key in self.idle:
            self.idle.remove(key)
        self.leases.append((key, claim.filled))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), works=st.booleans())
    def release(self, data: st.DataObject, works: bool) -> None:
        key, _ = data.draw(st.sampled_from(self.leases))
        self.release_one(key, works)

    def release_one(self, key: int, works: bool) -> None:
        filled = next(filled for other, filled in self.leases if other == key)
        self.leases.remove((key, filled))
        others = sum(other == key for other, _ in self.leases)
        filled = filled or works or others > 0
        self.table.release(key, filled=filled)
        if others:
            return
        if filled:
            self.idle.append(key)
        else:
            del self.entries[key]

    @rule(key=st.sampled_from(KEYS))
    def use(self, key: int) -> None:
        self.lease(key)
        if (key, True) in self.leases or (key, False) in self.leases:
            self.release_one(key, works=True)

    @rule(key=st.sampled_from(KEYS), in_slot=st.booleans())
    def shadow(self, key: int, in_slot: bool) -> None:
        self.table.shadow(key, in_slot)
        (self.in_slots.add if in_slot else self.in_slots.discard)(key)
        if key in self.idle:  # it counts as used now
            self.idle.remove(key)
            self.idle.append(key)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.table) == len(self.entries) <= self.capacity
        assert sorted(self.table.keys()) == sorted(self.entries)
        assert all((key in self.table) == (key in self.entries) for key in KEYS)
        self.table.check_shadows(self.in_slots)
        self.table.check(idle=False)
        if self.leases:
            with pytest.raises(AssertionError):
                self.table.check()
        else:
            self.table.check()


ArenaModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestArenaTable = ArenaModel.TestCase


def put(table: ArenaTable, *keys: int) -> None:
    for key in keys:
        assert table.lease(key) is not None
        table.release(key, filled=True)


def test_a_copy_that_is_also_in_a_slot_leaves_first() -> None:
    table = ArenaTable(3)
    put(table, 1, 2, 3)
    table.shadow(3, True)
    put(table, 4)
    assert sorted(table.keys()) == [1, 2, 4], "3 was the youngest, but redundant"
    put(table, 5)
    assert sorted(table.keys()) == [2, 4, 5], "then the least recently used"
    table.shadow(4, True)
    table.check()
    table.shadow(4, False)
    table.check()
    put(table, 6)
    assert sorted(table.keys()) == [4, 5, 6]


def test_using_an_entry_makes_it_young() -> None:
    table = ArenaTable(2)
    put(table, 1, 2, 1, 3)
    assert sorted(table.keys()) == [1, 3]


def test_a_failed_fill_is_forgotten() -> None:
    table = ArenaTable(1)
    assert table.lease(7) == (0, False)
    table.release(7, filled=False)
    assert table.lease(7) == (0, False), "must be read again"


def test_when_all_are_leased_nothing_can_be_claimed() -> None:
    table = ArenaTable(1)
    table.lease(1)
    assert table.lease(2) is None
    assert table.lease(1) == (0, True)


def test_check_sees_damage() -> None:
    table = ArenaTable(2)
    put(table, 1)
    table._entry[2] = 0
    with pytest.raises(AssertionError):
        table.check()
    with pytest.raises(AssertionError, match="wrong idea"):
        table.check_shadows({1})


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 experts"):
        ArenaTable(0)


def test_blobs_do_not_overlap_and_are_aligned() -> None:
    arena = HostArena(LAYOUT, 3)
    for entry in range(3):
        assert len(arena.blob(entry)) == LAYOUT.nbytes
        arena.blob(entry)[:] = entry + 1
    assert [int(arena.blob(entry).sum()) for entry in range(3)] == [
        (entry + 1) * LAYOUT.nbytes for entry in range(3)
    ]
    assert arena.blob(0).ctypes.data % 4096 == 0
    assert arena.blob(1).ctypes.data % 256 == 0
    assert arena.nbytes == 3 * LAYOUT.nbytes


def test_untouched_entries_take_no_memory() -> None:
    layout = gated_layout(512, 512, "float32")  # 3 MiB
    process = psutil.Process()
    before = process.memory_info().rss
    arena = HostArena(layout, 40)
    assert process.memory_info().rss - before < 20 << 20
    for entry in range(20):
        arena.blob(entry)[:] = np.uint8(1)
    assert 50 << 20 < process.memory_info().rss - before < 80 << 20
