"""The cache as a whole, over a store that can fail, wait and count."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import ConfigError, ModelError, StepFailed
from moestro.expert_cache import fetch
from moestro.expert_cache.cache import ExpertCache
from moestro.expert_cache.policies import POLICIES, make_policy
from moestro.expert_cache.policies.lru import Lru
from moestro.expert_cache.trace import TraceWriter, read_trace
from tests.expert_cache.fakes import FakeStore, counts_of, holds, small_cache, use

LAYERS, EXPERTS = 2, 6

steps = st.lists(
    st.tuples(
        st.sampled_from(["decode", "sweep"]),
        st.lists(st.sets(st.integers(0, EXPERTS - 1)), min_size=LAYERS, max_size=LAYERS),
    ),
    max_size=8,
)


@given(
    steps=steps,
    name=st.sampled_from(sorted(POLICIES)),
    cache_slots=st.integers(0, 14),
    staging=st.integers(2, 5),
    host=st.integers(2, 14),
    workers=st.integers(1, 3),
    broken=st.sets(st.integers(0, LAYERS * EXPERTS - 1), max_size=3),
    leave_early=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_any_use_of_any_size(
    steps: list[Any],
    name: str,
    cache_slots: int,
    staging: int,
    host: int,
    workers: int,
    broken: set[int],
    leave_early: bool,
) -> None:
    store = FakeStore()
    store.broken = {divmod(key, EXPERTS): OSError(f"no {key}") for key in broken}
    policy = make_policy(name, LAYERS, EXPERTS)
    cache = small_cache(
        store,
        slots=cache_slots + staging,
        staging=staging,
        host=host,
        workers=workers,
        policy=policy,
    )
    wanted = 0
    try:
        for number, (kind, layers) in enumerate(steps):
            cache.begin_pass(kind)
            for layer, some in enumerate(layers):
                experts = sorted(some)
                wanted += len(experts)
                ids = np.array([experts], np.int64)
                unlucky = {layer * EXPERTS + expert for expert in experts} & broken
                with may_fail(bool(unlucky)):
                    use(cache, layer, experts, ids=ids, sequences=["s"])
                if leave_early and experts:
                    wanted += len(experts)
                    counts = counts_of(experts, EXPERTS)
                    with may_fail(bool(unlucky)), cache.acquire(layer, counts) as lease:
                        next(iter(lease.groups()))
                cache.check(verify_bytes=number % 3 == 0 and not broken)
        stats = cache.stats()
        assert stats.hits + stats.misses == wanted
        assert stats.slots.resident <= cache_slots
        assert stats.host.resident <= host
    finally:
        cache.close()


@contextmanager
def may_fail(allowed: bool) -> Iterator[None]:
    try:
        yield
    except StepFailed:
        if not allowed:
            raise


def test_residents_come_first_and_in_one_group() -> None:
    cache = small_cache(FakeStore(delay=0.005), slots=6, staging=2)
    use(cache, 0, [0, 1])
    groups = use(cache, 0, [0, 1, 2, 3])
    assert groups[0] == [0, 1]
    assert use(cache, 0, [0, 1, 2, 3]) == [[0, 1, 2, 3]]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.staged) == (6, 4, 0)
    cache.close()


def test_no_wanted_expert_gives_no_group() -> None:
    cache = small_cache()
    assert use(cache, 0, []) == []
    cache.check()
    cache.close()


def test_with_the_fewest_slots_everything_is_staged() -> None:
    cache = small_cache(slots=ExpertCache.minimum_slots, staging=2, host=ExpertCache.minimum_host)
    for _ in range(3):
        cache.begin_pass()
        for layer in range(LAYERS):
            assert [len(group) for group in use(cache, layer, list(range(EXPERTS)))] == [1] * 6
        cache.check(verify_bytes=True)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.staged) == (0, 36, 36)
    cache.close()


def test_half_the_ring_is_copied_while_the_other_half_is_used() -> None:
    store = FakeStore()
    cache = small_cache(store, slots=4, staging=4, host=6)
    with cache.acquire(0, counts_of(list(range(EXPERTS)), EXPERTS)) as lease:
        groups = lease.groups()
        while cache._fetcher._done.qsize() < 4:  # the whole ring has been filled
            time.sleep(0.001)
        first = next(groups)
        assert len(first.experts) == 2, "half the ring"
        assert sum(store.reads.values()) == 4
        second = next(groups)  # says that the first two have been used
        assert len(second.experts) == 2
        while sum(store.reads.values()) < 6:
            time.sleep(0.001)
        assert all(
            holds(cache, slot, 0, expert)
            for expert, slot in zip(second.experts, second.slots, strict=True)
        ), "copies went into the slots that had been used, not into these"
        assert sorted(e for group in groups for e in group.experts) == [4, 5]
    cache.check()
    cache.close()


def test_a_group_stays_whole_until_the_next_is_asked_for() -> None:
    cache = small_cache(layers=1, experts=12, slots=5, staging=3, host=3)
    seen = []
    with cache.acquire(0, counts_of(list(range(12)), 12)) as lease:
        for group in lease.groups():
            time.sleep(0.01)  # time enough for a wrong copy to land on it
            for expert, slot in zip(group.experts, group.slots, strict=True):
                assert holds(cache, slot, 0, expert)
            seen += group.experts
    assert sorted(seen) == list(range(12))
    cache.check(verify_bytes=True)
    cache.close()


def test_experts_of_a_group_ascend_in_whichever_order_they_arrive() -> None:
    class Late(FakeStore):
        """Expert 1 arrives after expert 4."""

        def read(self, layer: int, expert: int, out: memoryview) -> int:
            while expert == 1 and not cache._fetcher._done.qsize():
                time.sleep(0.001)
            return super().read(layer, expert, out)

    cache = small_cache(Late(), slots=2, staging=2, host=4, workers=2)
    with cache.acquire(0, counts_of([1, 4], EXPERTS)) as lease:
        groups = lease.groups()
        while cache._fetcher._done.qsize() < 2:
            time.sleep(0.001)
        group = next(groups)
        assert group.experts == [1, 4]  # as rows are, that are sorted by expert
        assert holds(cache, group.slots[0], 0, 1)
        assert next(groups, None) is None
    cache.close()


def test_a_used_staging_slot_is_filled_before_waiting_for_another() -> None:
    class Chained(FakeStore):
        """Expert 1 arrives only once expert 2 is being read."""

        def __init__(self) -> None:
            super().__init__()
            self.begun = threading.Event()

        def read(self, layer: int, expert: int, out: memoryview) -> int:
            if expert == 1 and not self.begun.wait(10):
                raise TimeoutError("expert 2 was not asked for meanwhile")
            if expert == 2:
                self.begun.set()
            return super().read(layer, expert, out)

    cache = small_cache(Chained(), slots=2, staging=2, host=4, workers=2)
    assert use(cache, 0, [0, 1, 2])[0] == [0]
    cache.close()


def test_fetches_run_while_the_caller_computes() -> None:
    store = FakeStore(delay=0.02)
    cache = small_cache(store, slots=8, staging=2, host=6, workers=1)
    with cache.acquire(0, counts_of([0, 1, 2, 3], EXPERTS)) as lease:
        groups = lease.groups()
        next(groups)
        assert lease.exposed >= 0.01
        waited = lease.exposed
        time.sleep(0.15)
        assert sum(store.reads.values()) == 4
        assert sum(len(group.experts) for group in groups) == 3
        assert lease.exposed - waited < 0.01, "the rest had arrived meanwhile"
        waited = lease.exposed
    stats = cache.stats()
    assert stats.exposed_seconds == stats.layers[0].exposed_seconds == waited
    assert stats.fetch_seconds >= 4 * 0.02
    cache.close()


def test_an_expert_is_read_once_while_the_arena_keeps_it() -> None:
    store = FakeStore()
    cache = small_cache(store, slots=2, staging=2, host=12)
    for _ in range(3):
        for layer in range(LAYERS):
            use(cache, layer, list(range(EXPERTS)))
    assert set(store.reads.values()) == {1}
    stats = cache.stats()
    assert (stats.disk.hits, stats.host.hits) == (12, 24)
    assert stats.disk.bytes_read == 12 * 512
    assert stats.host.bytes_read == 36 * 512
    cache.check()
    cache.close()


def test_the_arena_gives_up_copies_of_what_is_in_slots() -> None:
    store = FakeStore()
    cache = small_cache(store, layers=1, experts=6, slots=2 + 3, staging=2, host=3)
    use(cache, 0, [0, 1, 2])  # in slots and in the arena
    for expert in (3, 4, 5):
        use(cache, 0, [0, 1, 2, expert])  # nobody to evict: staged
    assert sorted(cache._arena.table.keys()) == [3, 4, 5]
    cache.begin_pass()
    for experts in ([3], [4], [5]):
        use(cache, 0, experts)  # LRU moves them into slots
    assert max(store.reads.values()) == 1
    cache.check(verify_bytes=True)
    cache.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("io"), StepFailed),
        (ModelError("file x ends at offset 7"), ModelError),
        (MemoryError(), StepFailed),
    ],
)
@pytest.mark.parametrize("slots", [2, 12])
def test_a_failed_fetch_is_raised_and_leaves_no_trace(
    error: Exception, kind: type[Exception], slots: int
) -> None:
    store = FakeStore()
    cache = small_cache(store, slots=slots, staging=2)
    use(cache, 0, [0])
    store.broken[0, 3] = error
    with cache.acquire(0, counts_of([0, 1, 2, 3, 4], EXPERTS)) as lease:
        with pytest.raises(kind) as raised:
            list(lease.groups())
        assert cache._open is None, "the lease has closed itself"
    assert raised.value is error or raised.value.__cause__ is error
    cache.check(verify_bytes=True)
    store.broken.clear()
    use(cache, 0, [0, 1, 2, 3, 4])
    cache.check(verify_bytes=True)
    cache.close()


def test_an_error_of_the_caller_gives_everything_back() -> None:
    cache = small_cache(FakeStore(delay=0.002), slots=4, staging=2)

    def compute() -> None:
        with cache.acquire(0, counts_of([0, 1, 2, 3, 4, 5], EXPERTS)) as lease:
            for _ in lease.groups():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compute()
    cache.check(verify_bytes=True)
    use(cache, 0, [0, 1, 2, 3, 4, 5])
    cache.close()


def test_a_lease_that_is_never_iterated_gives_everything_back() -> None:
    cache = small_cache(slots=4, staging=2)
    with cache.acquire(0, counts_of([0, 1, 2, 3], EXPERTS)):
        pass
    cache.check(verify_bytes=True)
    assert cache.stats().slots.resident == 2, "what was fetched for a slot is kept"
    cache.close()


def test_groups_that_outlive_their_lease_end() -> None:
    cache = small_cache(slots=4, staging=2)
    with cache.acquire(0, counts_of([0, 1, 2, 3], EXPERTS)) as lease:
        groups = lease.groups()
        next(groups)
    assert list(groups) == []
    with pytest.raises(AssertionError, match="closed"):
        lease.groups()
    lease.close()
    cache.check()
    cache.close()


def test_one_lease_at_a_time() -> None:
    cache = small_cache()
    with cache.acquire(0, counts_of([0], EXPERTS)):
        for wrong in (
            lambda: cache.acquire(0, counts_of([1], EXPERTS)),
            lambda: cache.fill(beside_work=True),
            cache.check,
            cache.close,
        ):
            with pytest.raises(AssertionError, match="open"):
                wrong()
    use(cache, 0, [0])
    cache.check()
    cache.close()


def test_what_is_leased_is_pinned_while_others_arrive() -> None:
    cache = small_cache(slots=5, staging=2, layers=1)
    use(cache, 0, [0, 1])
    with cache.acquire(0, counts_of([0, 1, 2, 3], EXPERTS)) as lease:
        assert cache._table.evictable().tolist() == []
        assert sum(len(group.experts) for group in lease.groups()) == 4
        assert cache._table.evictable().tolist() == []
    assert len(cache._table.evictable()) == 3
    cache.close()


def test_a_disk_that_hangs_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_SECONDS", 0.05)
    store = FakeStore()
    cache = small_cache(store, slots=12, staging=2, host=4)
    use(cache, 0, [0])
    store.gate.clear()
    with pytest.raises(StepFailed, match="no expert arrived"):
        use(cache, 0, [0, 1, 2])
    assert use(cache, 0, [0]) == [[0]], "residents are still served"
    with pytest.raises(StepFailed, match="stuck"):
        cache.acquire(0, counts_of([3], EXPERTS))
    with pytest.raises(AssertionError, match="flying"):
        cache.check()
    store.gate.set()
    while cache._fetcher._done.qsize() < 2:
        time.sleep(0.001)
    use(cache, 0, [0, 1, 2, 3])
    cache.check(verify_bytes=True)
    cache.close()


def test_what_was_used_before_comes_first() -> None:
    policy = make_policy("lru", LAYERS, EXPERTS)
    store = FakeStore()
    cache = small_cache(store, slots=2 + 1, staging=2, host=2, policy=policy)
    policy.touch(1, np.array([4]), np.array([1]), None, 1)
    cache.start_fill()
    cache.finish_fill()
    assert np.flatnonzero(cache._table.slot_of >= 0).tolist() == [EXPERTS + 4]
    cache.close()


def test_stats_add_up() -> None:
    cache = small_cache(slots=2 + 2, staging=2, host=2)
    for experts in ([0, 1], [0, 1], [2, 3, 4]):
        cache.begin_pass()
        use(cache, 0, experts)
    use(cache, 1, [5])
    stats = cache.stats()
    assert (stats.policy, stats.expert_bytes) == ("lru", 512)
    assert (stats.hits, stats.misses) == (2, 6)
    assert [(row.layer, row.hits, row.misses) for row in stats.layers] == [(0, 2, 5), (1, 0, 1)]
    assert stats.fetches == stats.misses == sum(stats.fetch_latency_buckets.values())
    assert stats.host.hits + stats.disk.hits == stats.misses
    assert [row.bytes_fetched for row in stats.layers] == [5 * 512, 512]
    assert stats.slots.capacity == 2
    assert stats.host.capacity == 2
    assert stats.slots.resident == sum(row.resident for row in stats.layers) == 2
    assert stats.evictions + stats.staged + 2 == stats.misses
    assert list(stats.fetch_latency_buckets)[-1] == "inf"
    cache.close()


def test_policy_and_trace_hear_of_routing(tmp_path: Any) -> None:
    class Listener(Lru):
        wants_sequences = True
        wants_gates = True

        def __init__(self) -> None:
            super().__init__(LAYERS, EXPERTS)
            self.heard: list[Any] = []

        def touch(self, layer: int, experts: Any, counts: Any, gates: Any, clock: int) -> None:
            super().touch(layer, experts, counts, gates, clock)
            self.heard.append((experts.tolist(), counts.tolist(), gates.round(3).tolist(), clock))

        def observe(self, sequences: Any, layer: int, ids: Any, row_of: Any) -> None:
            self.heard.append((list(sequences), layer, ids.tolist(), row_of.tolist()))

        def finish(self, sequence: str) -> None:
            self.heard.append(sequence)

    policy = Listener()
    trace = TraceWriter(tmp_path / "t", LAYERS, EXPERTS, 2, "m")
    cache = ExpertCache(
        FakeStore(), LAYERS, EXPERTS, slots=4, staging=2, host=2, policy=policy, trace=trace
    )
    assert cache.wants_ids
    cache.begin_pass("sweep", 3)
    ids = np.array([[0, 1], [1, 2], [1, 0]])
    gates = np.array([[0.5, 0.25], [0.5, 0.5], [0.75, 0.25]])
    more = {"ids": ids, "gates": gates, "sequences": ["p", "q"], "row_of": np.array([0, 0, 1])}
    use_counts = np.bincount(ids.ravel(), minlength=EXPERTS)
    with cache.acquire(1, use_counts, **more) as lease:  # type: ignore[arg-type]
        assert sum(len(group.experts) for group in lease.groups()) == 3
    cache.finish_sequence("q")
    with cache.acquire(1, use_counts, ids=ids, sequences=["p", "r", "p"], gates=gates) as lease:
        list(lease.groups())
    cache.close()
    trace.close()
    touched = ([0, 1, 2], [2, 3, 1], [0.25, 0.5, 0.167], 1)
    assert policy.heard == [
        (["p", "q"], 1, ids.tolist(), [0, 0, 1]),
        touched,
        "q",
        (["p", "r"], 1, ids.tolist(), [0, 1, 0]),
        touched,
    ]
    (step,) = read_trace(tmp_path / "t")
    assert (step.kind, step.rows, step.finished) == ("sweep", 3, [1])
    assert [route.sequences.tolist() for route in step.routes] == [[0, 0, 1], [0, 2, 0]]


def test_parts_of_a_layer_know_of_the_whole() -> None:
    cache = small_cache(layers=2, experts=6, slots=2 + 4, staging=2)
    cache.begin_pass("sweep", 9)
    whole = counts_of([0, 1, 1, 2, 3, 3, 3, 4, 5], 6)
    for part in ([0, 1, 1, 2], [3, 3, 3, 4, 5]):
        use(cache, 0, part, whole=whole)
    assert np.flatnonzero(cache._table.rows[0] >= 0).tolist() == [1, 3], "the share is 2"
    for _ in range(2):
        cache.begin_pass()
    use(cache, 1, [0, 1])
    cache.begin_pass()
    cache.begin_pass()
    for part in ([2, 4, 5, 5], [1]):
        use(cache, 0, part, whole=counts_of([1, 2, 4, 5, 5], 6))
    stats = cache.stats().layers[0]
    assert (stats.hits, stats.misses) == (1, 9), "1 was not evicted for the first part"
    cache.check()
    cache.close()


def test_ids_are_not_wanted_by_plain_policies() -> None:
    cache = small_cache()
    assert not cache.wants_ids
    cache.close()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"staging": 1}, "1 staging slots; at least 2"),
        ({"slots": 1}, "1 expert slots are fewer than the 2"),
        ({"host": 1}, "host arena of 1 experts; at least 2"),
        ({"workers": 0}, "0 fetch workers"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_cache(**sizes)  # type: ignore[arg-type]


def test_check_compares_bytes_with_the_store() -> None:
    cache = small_cache()
    use(cache, 1, [2])
    cache.check(verify_bytes=True)
    slot = int(cache._table.slot_of[EXPERTS + 2])
    cache.down[slot][7, 3] += 1
    cache.check()
    with pytest.raises(AssertionError, match="down is not that of expert 2 of MoE layer 1"):
        cache.check(verify_bytes=True)
    cache.close()


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    cache = small_cache(workers=3)
    assert threading.active_count() == before + 3
    cache.close()
    assert threading.active_count() == before


def test_the_kernels_lists_are_views_of_one_slab() -> None:
    cache = small_cache(slots=5)
    assert len(cache.gate_up) == len(cache.down) == 5
    assert (cache.gate_up[4].shape, cache.down[4].shape) == ((8, 8), (8, 4))
    assert cache.gate_up[0].dtype == torch.float32
    base = cache._pool.slab.data_ptr()
    assert cache.gate_up[3].data_ptr() == base + 3 * 512
    assert cache.down[3].data_ptr() == base + 3 * 512 + 256
    cache.close()


def test_nothing_grows_with_use() -> None:
    cache = small_cache(slots=2 + 3, staging=2, host=3)

    def objects() -> int:
        for number in range(30):
            cache.begin_pass()
            for layer in range(LAYERS):
                use(cache, layer, [number % EXPERTS, (number * 5 + 1) % EXPERTS])
        gc.collect()
        return len(gc.get_objects())

    objects()
    first = objects()
    assert abs(objects() - first) < 50
    cache.close()


def test_a_hit_costs_microseconds() -> None:
    cache = small_cache(experts=32, slots=66, staging=2)
    cache.start_fill(range(64))
    cache.finish_fill()
    counts = counts_of([1, 5, 9, 30], 32)

    def once() -> None:
        with cache.acquire(0, counts) as lease:
            for _ in lease.groups():
                pass

    best = min(_time(once, 200) for _ in range(20))
    assert best < 60e-6, "about 6 on a quiet core"  # the bound only catches a change of kind
    cache.close()


def _time(call: Any, times: int) -> float:
    begun = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - begun) / times
