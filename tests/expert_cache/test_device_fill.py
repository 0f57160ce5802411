"""The fill beside decode steps and sweeps of a GPU, whose kernels a plain model stands in for.

What must hold: a step never reads an entry that the fill writes, host and device agree about slots
after every upload, and each expert that is computed with has its own bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moestro.expert_cache import host_link, page_lock
from moestro.expert_cache.device_cache import DeviceCache
from moestro.expert_cache.fill import Fill
from moestro.expert_cache.policies import make_policy
from moestro.expert_cache.residency import STAGE
from moestro.expert_cache.stream import GROUPS, ExpertStream
from moestro.kernels.reference_tables import NONE, NOT_IN_HOST_MEMORY, Tables, acquire
from tests.expert_cache.fakes import LAYOUT, FakeStore, HeldFetcher
from tests.expert_cache.test_page_lock import FakeLocker

LAYERS, EXPERTS, TOP_K, ROWS = 2, 8, 2, 2
KEYS = LAYERS * EXPERTS
MOST = ROWS * TOP_K  # experts that a layer of a step needs at most
NAMES = ["a", "b"]


def step_tables(cache: DeviceCache) -> Tables:
    """The device's tables as lists."""
    tables = cache.tables
    first, length = tables.cursor.tolist()
    return Tables(
        slot_of=tables.slot_of.tolist(),
        owner=tables.owner.tolist(),
        source=tables.source.tolist(),
        admit=[bool(one) for one in tables.admit.tolist()],
        victims=tables.victims.tolist()[:length],
        ring=tables.ring,
        experts=tables.experts,
        cursor=first,
        fault=tuple(tables.fault.tolist()),
    )


def write_back(cache: DeviceCache, after: Tables) -> None:
    tables = cache.tables
    tables.slot_of.copy_(torch.tensor(after.slot_of))
    tables.owner.copy_(torch.tensor(after.owner))
    tables.cursor[0] = after.cursor
    tables.fault.copy_(torch.tensor(after.fault))


class DeviceFillModel(RuleBasedStateMachine):
    """Every way in which experts move, in any order."""

    @initialize(
        complete=st.booleans(),
        slots=st.integers(MOST, KEYS - 1),
        host=st.integers(4, KEYS + 2),
        order=st.permutations(range(KEYS)),
        locker=st.sampled_from(["none", "all", "some", "small ring", "nothing"]),
    )
    def start(self, complete: bool, slots: int, host: int, order: list[int], locker: str) -> None:
        fails = {"none": None, "all": None, "some": 3, "small ring": 1, "nothing": 0}[locker]
        self.patches = [
            mock.patch.object(host_link, "HEADROOM", 4096),
            mock.patch.object(page_lock, "CHUNK", 1),  # 8 blobs a chunk
        ]
        for patch in self.patches:
            patch.start()
        self.store = FakeStore()
        self.cache = DeviceCache(
            self.store,  # type: ignore[arg-type]
            LAYERS,
            EXPERTS,
            slots=KEYS if complete else slots,
            ring=0 if complete else 2,
            staging=0 if complete else GROUPS * 2,
            host=host,
            policy=make_policy("lru_frequency", LAYERS, EXPERTS),
            device=torch.device("cpu"),
            workers=1,
            locker=None if locker == "none" else FakeLocker(fails),
        )
        self.stream = ExpertStream(self.cache)
        fetcher: Any = HeldFetcher(self.store, self.cache.arena)
        self.fetcher: HeldFetcher = fetcher
        self.cache._fill = Fill(
            self.cache.table,
            self.cache.arena.table,
            fetcher,
            order,
            EXPERTS,
            self.cache._copy,
            self.cache._meter.moved,
        )

    def holds(self, key: int, slot: int) -> None:
        row = self.cache.slab[slot].numpy().view(np.float32)
        value = key // EXPERTS * 1000 + key % EXPERTS
        found = row[[0, 63, 64, 95]].tolist()
        assert found == [value, value, -value - 0.5, -value - 0.5], f"slot {slot} is not {key}"

    @rule(beside_work=st.booleans())
    def fill(self, beside_work: bool) -> None:
        self.cache.fill(beside_work=beside_work)

    @rule(index=st.integers(0, 40), works=st.integers(0, 9).map(bool))
    def finish(self, index: int, works: bool) -> None:
        self.fetcher.finish(index, works=works)

    @rule(
        ids=st.lists(
            st.lists(st.integers(0, EXPERTS - 1), min_size=MOST, max_size=MOST),
            min_size=LAYERS,
            max_size=LAYERS,
        ),
        ends=st.lists(st.integers(0, 5), max_size=3),
    )
    def step(self, ids: list[list[int]], ends: list[int]) -> None:
        """A decode step, while reads of the fill end."""
        cache = self.cache
        if cache.dirty:
            cache.upload()
        else:
            cache.refresh()
        after = step_tables(cache)
        n_jobs = np.zeros(LAYERS, np.int32)
        job_key, job_slot = np.full((2, LAYERS, MOST), -1, np.int32)
        for layer, routes in enumerate(ids):
            work = acquire(layer, routes, after)
            for index in ends:
                self.fetcher.finish(index)
            for number, job in enumerate(work.jobs):
                blob = ctypes.string_at(job.source, LAYOUT.nbytes)
                cache.slab[job.slot].copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
                job_key[layer, number], job_slot[layer, number] = job.key, job.slot
            n_jobs[layer] = len(work.jobs)
            for expert, slot in zip(sorted(set(routes)), work.group_slot, strict=False):
                self.holds(layer * EXPERTS + expert, slot)
        write_back(cache, after)
        if after.fault[0] == NONE:
            routed = np.array(ids).reshape(LAYERS, ROWS, TOP_K)
            cache.collect(routed, n_jobs, job_key, job_slot, 0 * n_jobs, np.zeros(LAYERS), NAMES)
            return
        assert after.fault[0] == NOT_IN_HOST_MEMORY, "there are slots for each layer of a step"
        cache.faulted(n_jobs, job_key, job_slot)
        for layer, routes in enumerate(ids):
            self.sweep(layer, sorted(set(routes)))

    @rule(
        layer=st.integers(0, LAYERS - 1),
        experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1).map(sorted),
    )
    def sweep(self, layer: int, experts: list[int]) -> None:
        """A layer of a sweep, as `engine.gpu.sweep` goes about it."""
        cache, residency = self.cache, self.cache.residency
        residency.begin_pass("sweep")
        counts = np.bincount(experts, minlength=EXPERTS)
        wanted, slots = residency.want(layer, counts, None)
        if not self.stream.size and (slots < 0).any():
            self.stream.seat(layer, wanted[slots < 0].tolist())
            slots = cache.table.rows[layer][wanted]
            assert (slots >= 0).all()
        for expert, slot in zip(wanted[slots >= 0].tolist(), slots[slots >= 0], strict=True):
            self.holds(layer * EXPERTS + expert, int(slot))
        missing = wanted[slots < 0].tolist()
        if not missing:
            return
        placed = residency.place(layer, np.array(missing), counts)
        cache.dirty = True
        for place in placed:
            if place.evicted >= 0:
                cache.arena.table.shadow(place.evicted, False)
        reserved = {place.expert: place for place in placed if place.slot != STAGE}
        while missing:
            part, missing = missing[: self.stream.size], missing[self.stream.size :]
            self.stream.start(layer, part)
            batch = self.stream.take()
            for expert, slot in zip(batch.experts, batch.slots, strict=False):
                key = layer * EXPERTS + expert
                self.holds(key, slot)
                if expert not in reserved:
                    continue
                place = reserved[expert]
                if cache.table.slot_of[key] >= 0:
                    cache.table.release(place.slot)
                else:
                    cache.slab[place.slot].copy_(cache.slab[slot])
                    cache.table.bind(place.slot, key)
                    cache.arena.table.shadow(key, True)
            self.stream.used(batch)
        self.stream.drop()

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.table.check()
        assert cache._fill is not None
        cache.arena.table.check(filling=cache._fill.flying)
        for key in np.flatnonzero(cache.table.slot_of >= 0).tolist():
            self.holds(key, int(cache.table.slot_of[key]))
        stats = cache.stats().fill
        assert stats.resident <= stats.total
        if not cache.dirty:
            assert cache.tables.slot_of.tolist() == cache.table.slot_of.tolist()
            assert cache.tables.owner.tolist() == cache.table.owner.tolist()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.finish_fill()
        assert not self.cache.filling
        self.books()
        self.cache.check(verify_bytes=True)
        readable = int((self.cache.tables.source != 0).sum())
        held = self.cache.arena.table.entries().values()
        assert readable == sum(entry < self.cache.link.readable for entry in held)
        self.stream.drop()
        self.cache.close()
        for patch in self.patches:
            patch.stop()


DeviceFillModel.TestCase.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
TestDeviceFill = DeviceFillModel.TestCase


def waiting(host: int) -> tuple[DeviceCache, HeldFetcher]:
    """A cache whose fill has begun; its reads end when told so."""
    store: Any = FakeStore()
    cache = DeviceCache(
        store,
        LAYERS,
        EXPERTS,
        slots=8,
        ring=2,
        staging=2 * GROUPS,
        host=host,
        policy=make_policy("lru", LAYERS, EXPERTS),
        device=torch.device("cpu"),
        workers=1,
    )
    fetcher: Any = HeldFetcher(store, cache.arena)
    order = list(range(KEYS))
    cache._fill = Fill(
        cache.table, cache.arena.table, fetcher, order, EXPERTS, cache._copy, cache._meter.moved
    )
    cache.upload()
    return cache, fetcher


def test_steps_go_on_running_ahead_until_enough_has_arrived() -> None:
    cache, fetcher = waiting(host=16)
    none = np.zeros((LAYERS, MOST), np.int32)

    def step() -> bool:
        ids = np.full((LAYERS, ROWS, TOP_K), 0)
        no_jobs = np.zeros(LAYERS, np.int32)
        cache.collect(ids, no_jobs, none, none, no_jobs, np.zeros(LAYERS), NAMES)
        return cache.dirty

    assert len(fetcher.reading) == 8
    assert not step()
    for _ in range(3):
        fetcher.finish()
        assert not step(), "a few are not worth the gap"
    fetcher.finish()
    assert step()
    cache.upload()
    assert np.flatnonzero(cache.table.slot_of >= 0).tolist() == [0, 1, 2, 3]
    assert cache.tables.slot_of.tolist() == cache.table.slot_of.tolist()
    assert len(fetcher.reading) == 8
    cache.close()


def test_what_comes_between_two_turns_is_uploaded_before_the_next_step() -> None:
    cache, fetcher = waiting(host=16)
    assert not cache.dirty
    fetcher.finish()
    cache.fill(beside_work=True)
    assert cache.table.slot_of[0] >= 0
    assert cache.dirty
    cache.close()


def test_a_sweep_that_needs_the_whole_arena_gets_it() -> None:
    cache, fetcher = waiting(host=4)
    assert [fetch.key for fetch in fetcher.reading] == [0, 1]
    stream = ExpertStream(cache)
    stream.start(1, [0, 1])
    assert len(fetcher.reading) == 2
    stream.start(1, [2, 3])
    assert not fetcher.reading
    assert cache.dirty
    assert (cache.table.slot_of[:2] >= 0).all()
    stream.drop()
    cache.finish_fill()
    cache.check(verify_bytes=True)
    cache.close()
