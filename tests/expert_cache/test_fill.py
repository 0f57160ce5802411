"""The background fill on a CPU: what comes, in which order, and that demand may overtake it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moestro.errors import StepFailed
from moestro.expert_cache import fill as fills
from moestro.expert_cache.cache import ExpertCache
from moestro.expert_cache.fill import Fill
from tests.expert_cache.fakes import FakeStore, HeldFetcher, small_cache, use

LAYERS, EXPERTS = 2, 6
KEYS = LAYERS * EXPERTS


def begin(cache: ExpertCache, store: FakeStore, order: list[int]) -> HeldFetcher:
    """Start a fill whose reads the test ends."""
    fetcher: Any = HeldFetcher(store, cache._arena)
    cache._fill = Fill(
        cache._table,
        cache._arena.table,
        fetcher,
        order,
        EXPERTS,
        lambda entry, slot: cache._pool.write(slot, cache._arena.blob(entry)),
        cache._meter.moved,
    )
    held: HeldFetcher = fetcher
    return held


def seated(cache: ExpertCache) -> list[int]:
    return [int(key) for key in np.flatnonzero(cache._table.slot_of >= 0)]


class FillModel(RuleBasedStateMachine):
    """Steps, sweeps, reads that end in any order or fail: bytes and books stay right."""

    @initialize(
        order=st.permutations(range(KEYS)),
        cache_slots=st.integers(0, KEYS),
        host=st.integers(2, KEYS + 2),
    )
    def start(self, order: list[int], cache_slots: int, host: int) -> None:
        self.store = FakeStore()
        self.cache = small_cache(self.store, slots=2 + cache_slots, staging=2, host=host)
        self.cache._store = FakeStore()  # `check` reads every byte: that should not count
        self.fetcher = begin(self.cache, self.store, order)
        self.failed = 0
        self.demanded = False

    @rule(beside_work=st.booleans())
    def pump(self, beside_work: bool) -> None:
        self.cache.fill(beside_work=beside_work)

    @rule(index=st.integers(0, 40), works=st.integers(0, 9).map(bool))
    def finish(self, index: int, works: bool) -> None:
        self.failed += bool(self.fetcher.reading) and not works
        self.fetcher.finish(index, works=works)

    @rule(
        kind=st.sampled_from(["decode", "sweep"]),
        layer=st.integers(0, LAYERS - 1),
        experts=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=8),
    )
    def demand(self, kind: Any, layer: int, experts: list[int]) -> None:
        self.demanded = True
        self.cache.begin_pass(kind)
        flying = self.cache._fill.flying if self.cache._fill else frozenset()
        use(self.cache, layer, experts)  # looks at every byte
        now = self.cache._fill.flying if self.cache._fill else frozenset()
        assert now <= flying - {layer * EXPERTS + expert for expert in experts}

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check(verify_bytes=True)
        stats = self.cache.stats().fill
        arena = set(self.cache._arena.table.keys()) - self.cache._fill.flying  # type: ignore[union-attr]
        assert stats.resident == len(set(seated(self.cache)) | arena)
        assert stats.total == min(
            KEYS, self.cache._table.cache_slots + self.cache._arena.table.capacity
        )
        assert stats.resident <= stats.total
        assert stats.active == self.cache.filling

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.finish_fill()
        self.books()
        stats = self.cache.stats().fill
        assert not stats.active
        assert stats.failed == self.failed
        if not self.failed and not self.demanded:
            assert stats.resident == stats.total
            assert set(self.store.reads.values()) == {1}
        if not self.failed:
            assert self.cache._table.free == 0 or len(seated(self.cache)) == KEYS
        self.cache.close()


FillModel.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFill = FillModel.TestCase


def test_slots_come_first_then_the_arena_in_order() -> None:
    store = FakeStore()
    cache = small_cache(store, slots=2 + 3, staging=2, host=4, workers=3)
    seen: list[tuple[int, int]] = []
    cache.start_fill([7, 3, 3, 11, 0, 1, 2, 4, 5])
    assert cache.filling
    cache.finish_fill(lambda done, total: seen.append((done, total)))
    assert not cache.filling
    assert set(store.reads.values()) == {1}
    cache.check(verify_bytes=True)
    assert seated(cache) == [3, 7, 11]
    assert sorted(cache._arena.table.keys()) == [0, 1, 2, 4]
    assert seen[-1] == (7, 7)
    assert seen == sorted(seen)
    before = dict(store.reads)
    assert cache.stats().misses == 0
    use(cache, 1, [1, 5])
    use(cache, 0, [0, 1, 2, 3, 4])
    assert dict(store.reads) == before
    cache.close()


@given(
    order=st.lists(st.integers(0, 11), max_size=14),
    before=st.lists(st.sets(st.integers(0, 5)), max_size=4),
    kind=st.sampled_from(["decode", "sweep"]),  # a sweep leaves slots free
    cache_slots=st.integers(0, 6),
    host=st.integers(2, 8),
)
@settings(max_examples=80, deadline=None)
def test_nothing_that_is_there_is_given_up(
    order: list[int], before: list[set[int]], kind: Any, cache_slots: int, host: int
) -> None:
    cache = small_cache(slots=2 + cache_slots, staging=2, host=host)
    for experts in before:
        cache.begin_pass(kind)
        use(cache, 0, sorted(experts))
    slots = set(seated(cache))
    held = slots | set(cache._arena.table.keys())
    cache.start_fill(order)
    cache.finish_fill()
    cache.check(verify_bytes=True)
    now = set(seated(cache))
    after = now | set(cache._arena.table.keys())
    assert slots <= now
    assert held <= after or kind == "sweep"  # only there can slots be free and the arena full
    assert set(order) <= after or len(after) == cache_slots + host
    cache.close()


def test_what_the_arena_has_moves_to_free_slots_without_a_read() -> None:
    store = FakeStore()
    cache = small_cache(store, slots=2 + 4, staging=2, host=2)
    cache.begin_pass("sweep")
    use(cache, 0, [0, 1, 2, 2, 3, 3])  # a layer's share is 2: two stay in the arena only
    cache.start_fill([0, 1, 4, 5])
    cache.finish_fill()
    assert store.reads[0, 0] == store.reads[0, 1] == 1
    assert seated(cache) == [0, 1, 2, 3]
    assert sorted(cache._arena.table.keys()) == [4, 5]
    cache.check(verify_bytes=True)
    cache.close()


def test_what_goes_to_a_free_slot_passes_through_an_arena_that_is_full() -> None:
    cache = small_cache(slots=2 + 4, staging=2, host=2)
    cache.begin_pass("sweep")
    use(cache, 0, [0, 1, 2, 2, 3, 3])
    assert sorted(cache._arena.table.keys()) == [0, 1]
    cache.start_fill([6, 7, 8])
    cache.finish_fill()
    assert seated(cache) == [2, 3, 6, 7]
    cache.check(verify_bytes=True)
    cache.close()


def test_no_more_is_read_at_once_than_work_beside_it_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fills, "BESIDE_WORK", 2)
    monkeypatch.setattr(fills, "ALONE", 5)
    store = FakeStore()
    cache = small_cache(store, slots=2 + 2, staging=2, host=12)
    fetcher = begin(cache, store, list(range(12)))
    cache.fill(beside_work=True)
    assert [fetch.key for fetch in fetcher.reading] == [0, 1]
    cache.fill(beside_work=False)
    assert [fetch.key for fetch in fetcher.reading] == [0, 1, 2, 3, 4]
    cache.fill(beside_work=False)
    assert len(fetcher.reading) == 5
    cache.finish_fill()
    cache.close()


def test_half_the_arena_is_left_to_demand() -> None:
    store = FakeStore()
    cache = small_cache(store, slots=2 + 6, staging=2, host=4)
    fetcher = begin(cache, store, list(range(12)))
    cache.fill(beside_work=False)
    assert len(fetcher.reading) == 2
    use(cache, 1, [0, 1, 2, 3, 4, 5])
    assert len(fetcher.reading) == 2, "what nobody wanted is still under way"
    cache.finish_fill()
    cache.check(verify_bytes=True)
    cache.close()


def test_demand_waits_for_what_is_being_read_and_does_not_read_it_twice() -> None:
    store = FakeStore()
    store.gate.clear()
    cache = small_cache(store, slots=2 + 6, staging=2, host=4)
    cache.start_fill(range(12))
    cache.fill(beside_work=False)
    while sum(store.reads.values()) < 2:
        time.sleep(0.001)
    store.gate.set()
    with cache.acquire(0, np.bincount([0, 1], minlength=EXPERTS)) as lease:
        groups = [group.experts for group in lease.groups()]
        assert lease.exposed > 0
    assert groups == [[0, 1]], "both have got slots"
    assert store.reads[0, 0] == store.reads[0, 1] == 1
    cache.finish_fill()
    cache.check(verify_bytes=True)
    cache.close()


def test_a_disk_that_hangs_is_an_error_for_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestro.expert_cache.fetch.FETCH_SECONDS", 0.05)
    store = FakeStore()
    store.gate.clear()
    cache = small_cache(store, slots=2 + 6, staging=2, host=4)
    cache.start_fill(range(12))
    cache.fill(beside_work=False)
    with pytest.raises(StepFailed, match="no expert arrived"):
        cache.acquire(0, np.bincount([0], minlength=EXPERTS))
    store.gate.set()
    use(cache, 0, [0])
    cache.finish_fill()
    cache.check(verify_bytes=True)
    cache.close()


def test_a_bad_sector_costs_one_expert_and_who_needs_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore()
    store.broken[0, 2] = OSError("bad sector")
    cache = small_cache(store, slots=2 + 4, staging=2, host=4)
    cache.start_fill(range(12))
    cache.finish_fill()
    cache.check(verify_bytes=True)
    assert "expert 2 of MoE layer 0" in caplog.text
    assert cache.stats().fill.failed == 1
    assert cache.stats().fill.resident == 8
    with pytest.raises(StepFailed, match="expert 2 of MoE layer 0"):
        use(cache, 0, [2])
    store.broken.clear()
    use(cache, 0, [2])
    cache.check(verify_bytes=True)
    cache.close()


def test_closing_in_the_middle_ends_it() -> None:
    store = FakeStore(delay=0.001)
    cache = small_cache(store, slots=2 + 4, staging=2, host=6)
    cache.start_fill(range(12))
    cache.fill(beside_work=False)
    cache.close()
    assert not cache.filling
    assert sum(store.reads.values()) < 12
