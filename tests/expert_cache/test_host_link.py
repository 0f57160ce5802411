"""From the arena to the device: what is locked, what goes through the ring, what is said of it."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch

from moestro.expert_cache import host_link, locked_ring, page_lock
from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.host_link import HostLink
from moestro.expert_cache.locked_ring import LockedRing
from moestro.expert_cache.page_lock import CudaLocker
from tests.expert_cache.fakes import LAYOUT
from tests.expert_cache.test_page_lock import FakeLocker

CPU = torch.device("cpu")
BLOB = LAYOUT.nbytes
CHUNK = 4096 // BLOB  # entries of the smallest chunk


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "HEADROOM", 4096)
    monkeypatch.setattr(page_lock, "CHUNK", 1)


class LimitedLocker(FakeLocker):
    """Locks so many bytes at the same time."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def lock(self, address: int, nbytes: int) -> str | None:
        if sum(self.locked.values()) + nbytes > self.limit:
            return "not permitted"
        return super().lock(address, nbytes)


def filled(entries: int) -> tuple[HostArena, torch.Tensor]:
    arena = HostArena(LAYOUT, entries)
    for entry in range(entries):
        arena.blob(entry)[:] = entry + 1
    return arena, torch.zeros(entries, BLOB, dtype=torch.uint8)


def sent(link: HostLink, slab: torch.Tensor, entries: list[int]) -> None:
    slots = [len(slab) - 1 - entry for entry in entries]
    link.send(entries, slots)
    for entry, slot in zip(entries, slots, strict=True):
        assert bool((slab[slot] == entry + 1).all())


def test_a_cpu_reads_ordinary_memory() -> None:
    arena, slab = filled(5)
    link = HostLink(arena, slab, None)
    assert not link.locking
    assert (link.readable, link.locked_bytes, link.note) == (5, 0, None)
    sent(link, slab, [0, 4, 2])
    link.close()


def test_the_arena_is_locked_chunk_by_chunk_and_then_needs_no_ring() -> None:
    arena, slab = filled(3 * CHUNK + 1)
    locker = FakeLocker()
    link = HostLink(arena, slab, locker)
    assert link.readable == 0
    before = len(locker.locked)
    readable = []
    while link.locking:
        sent(link, slab, [0, CHUNK, 3 * CHUNK, 1])
        link.lock_more()
        readable.append(link.readable)
    assert readable == [CHUNK, 2 * CHUNK, 3 * CHUNK, 3 * CHUNK + 1]
    assert before == 2, "headroom and ring"
    assert sum(locker.locked.values()) == arena.nbytes == link.locked_bytes
    assert link.note is None
    sent(link, slab, [3, 2 * CHUNK])
    link.close()
    assert locker.locked == {}


def test_a_low_limit_leaves_a_ring_and_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    arena, slab = filled(4 * CHUNK)
    ring = locked_ring.PLACES * BLOB
    locker = LimitedLocker(4096 + ring + 4096 + 2000)  # headroom, ring, one chunk and a bit
    link = HostLink(arena, slab, locker)
    with caplog.at_level(logging.WARNING):
        while link.locking:
            link.lock_more()
    assert link.readable == CHUNK
    assert sum(locker.locked.values()) == ring + 4096, "the headroom has been given back"
    assert link.note is not None
    assert link.note in caplog.text
    assert "(not permitted)" in link.note
    assert "a locked ring of" in link.note
    sent(link, slab, [0, CHUNK - 1, CHUNK, 4 * CHUNK - 1])
    link.close()
    assert locker.locked == {}


def test_under_a_very_low_limit_the_ring_is_smaller_or_not_there() -> None:
    locker = LimitedLocker(4096 + 4096)
    ring = LockedRing(4096, locker, CPU)
    assert (ring.places, ring.nbytes) == (2, 8192)
    ring.close()
    assert locker.locked == {}
    arena, slab = filled(2 * CHUNK)
    link = HostLink(arena, slab, LimitedLocker(100))
    link.lock_more()
    assert not link.locking
    assert "pageable copies" in (link.note or "")
    sent(link, slab, list(range(2 * CHUNK)))
    link.close()


def test_blobs_may_be_overwritten_once_they_were_sent() -> None:
    ring = LockedRing(BLOB, FakeLocker(), CPU)
    blobs = np.arange(1, 21, dtype=np.uint8)[:, None].repeat(BLOB, 1)
    slab = torch.zeros(20, BLOB, dtype=torch.uint8)
    ring.send([(blobs[n], slab[n]) for n in range(20)])  # more than there are places
    blobs[:] = 0
    assert slab[:, 0].tolist() == slab[:, -1].tolist() == list(range(1, 21))
    ring.close()


def test_a_place_is_written_only_when_the_copy_out_of_it_is_over() -> None:
    """With a device that is slow: `Mark.wait` is where the host waits for it."""
    ring = LockedRing(BLOB, LimitedLocker(2 * 4096), CPU)
    assert ring.places == 8
    order: list[str] = []

    class Watched:
        def __init__(self, place: int) -> None:
            self.place = place

        def wait(self) -> None:
            order.append(f"wait {self.place}")

        def set(self) -> None:
            order.append(f"set {self.place}")

    ring._read = [Watched(place) for place in range(ring.places)]  # type: ignore[misc]
    blob = np.ones(BLOB, np.uint8)
    target = torch.zeros(BLOB, dtype=torch.uint8)
    ring.send([(blob, target)] * 9)
    assert order.count("wait 0") == 2
    assert order.index("set 0") < len(order) - 1 - order[::-1].index("wait 0")
    ring.close()


def test_a_blob_is_copied_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_ring, "PIECE", 100)
    monkeypatch.setattr(locked_ring.os, "sched_getaffinity", lambda pid: {0, 1})
    together = threading.Barrier(2)
    copyto = np.copyto

    def spy(into: np.ndarray, of: np.ndarray) -> None:
        together.wait(10)  # passes only when two threads are at it
        copyto(into, of)

    monkeypatch.setattr(np, "copyto", spy)
    ring = LockedRing(BLOB, FakeLocker(), CPU)
    target = torch.zeros(BLOB, dtype=torch.uint8)
    assert -(-BLOB // 100) % 2 == 0
    ring.send([(np.full(BLOB, 9, np.uint8), target)])
    assert bool((target == 9).all())
    ring.close()


@pytest.mark.gpu
def test_the_ring_copies_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = HostArena(LAYOUT, 40)
    slab = torch.zeros(40, BLOB, dtype=torch.uint8, device="cuda")
    link = HostLink(arena, slab, CudaLocker())
    for turn in range(5):
        for entry in range(40):
            arena.blob(entry)[:] = (entry + turn) % 251
        link.send(range(40), range(40))
        arena.memory[:] = 0
        torch.cuda.synchronize()
        assert slab[:, 0].tolist() == slab[:, -1].tolist() == [(n + turn) % 251 for n in range(40)]
    while link.locking:
        link.lock_more()
    assert link.readable == 40
    link.close()
