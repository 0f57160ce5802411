"""Page-locking: what is asked of the device, and what is said when it refuses."""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import pytest
import torch

from moestro.expert_cache import page_lock
from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.direct import aligned
from moestro.expert_cache.layout import gated_layout
from moestro.expert_cache.page_lock import PageLock, advice, chunks, populate
from tests.expert_cache.fakes import LAYOUT


class FakeLocker:
    """Writes down what is asked; the call number `fails` (from 0) is refused."""

    def __init__(self, fails: int | None = None, error: Exception | None = None) -> None:
        self.fails = fails
        self.error = error
        self.calls: list[tuple[str, int, int]] = []
        self.locked: dict[int, int] = {}

    def lock(self, address: int, nbytes: int) -> str | None:
        self.calls.append(("lock", address, nbytes))
        if self.fails == len(self.calls) - 1:
            if self.error is not None:
                raise self.error
            return "out of memory"
        self.locked[address] = nbytes
        return None

    def unlock(self, address: int) -> None:
        self.calls.append(("unlock", address, self.locked.pop(address)))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 64 << 20))


def memory(nbytes: int) -> Any:
    return aligned(nbytes)


def test_chunks_are_locked_in_order_and_given_back_in_reverse() -> None:
    locker, area = FakeLocker(), memory(20480)
    lock = PageLock(area, [8192, 8192, 4096], locker)
    for locked in (8192, 16384, 20480):
        assert lock.more
        assert lock.grow()
        assert lock.locked == locked
    assert not lock.more
    assert lock.reason is None
    lock.close()
    lock.close()
    assert lock.locked == 0
    start = area.ctypes.data
    assert [(name, at - start) for name, at, _ in locker.calls] == [
        *(("lock", at) for at in (0, 8192, 16384)),
        *(("unlock", at) for at in (16384, 8192, 0)),
    ]


def test_what_was_locked_before_a_refusal_stays() -> None:
    locker = FakeLocker(fails=2)
    lock = PageLock(memory(4 * 4096), [4096] * 4, locker)
    assert [lock.grow(), lock.grow(), lock.grow()] == [True, True, False]
    assert not lock.more, "the next one would be refused as well"
    assert (lock.locked, lock.reason) == (8192, "out of memory")
    assert len(locker.locked) == 2
    lock.close()
    assert locker.locked == {}


def test_an_exception_leaves_the_books_right() -> None:
    locker = FakeLocker(fails=1, error=RuntimeError("no device"))
    lock = PageLock(memory(8192), [4096, 4096], locker)
    lock.grow()
    with pytest.raises(RuntimeError, match="no device"):
        lock.grow()
    assert lock.locked == 4096
    lock.close()
    assert locker.locked == {}


def test_people_are_told_the_limit_what_is_needed_and_how_to_raise_it(limits: None) -> None:
    text = advice(4 << 30, 9 << 30, "out of memory", 64 << 20)
    for words in (
        "4.0 GiB of the 9.0 GiB",
        "(out of memory)",
        "a locked ring of 64.0 MiB",
        "computed as a sweep",
        "8.0 MiB (hard: 64.0 MiB)",
        "needed are 9.0 GiB",
        f"ulimit -l {9 << 20}`",
        "LimitMEMLOCK=infinity",
        "--ulimit memlock=-1",
    ):
        assert words in text
    assert "pageable copies" in advice(0, 9 << 30, "out of memory", 0)


def test_without_a_limit_memory_itself_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (infinity, infinity))
    text = advice(1 << 30, 2 << 30, "out of memory", 0)
    assert "is unlimited" in text
    assert "--host-memory" in text
    assert "ulimit -l" not in text


@pytest.mark.parametrize("blob", [256, 3072, 4096 * 2304, 4096 * 2304 + 256])
def test_chunks_end_at_pages_and_at_ends_of_blobs(
    blob: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_lock, "CHUNK", 64 << 20)
    total = blob * 101
    sizes = chunks(total, blob)
    assert sum(sizes) == total
    assert all(size % blob == 0 and size % 4096 == 0 for size in sizes[:-1])
    assert sizes[-1] % blob == 0
    unit = 16 * blob  # at most
    assert all(size <= max(64 << 20, unit) for size in sizes)


def test_addresses_are_those_of_the_blobs() -> None:
    arena = HostArena(LAYOUT, 3)
    assert [arena.address(n) for n in range(3)] == [arena.blob(n).ctypes.data for n in range(3)]
    with pytest.raises(AssertionError):
        arena.address(3)


def test_populating_brings_every_page_in_and_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_lock, "PIECE", 1 << 20)
    arena = HostArena(gated_layout(512, 512, "float32"), 4)  # 12 MiB
    assert resident(arena.memory) == 0
    arena.blob(2)[:] = 7
    populate(arena.memory)
    assert resident(arena.memory) == len(arena.memory) // 4096
    assert (arena.blob(2) == 7).all()
    assert not arena.blob(1).any()


def resident(memory: np.ndarray) -> int:
    """Pages of `memory` that are present, by /proc/self/pagemap."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(memory.ctypes.data // 4096 * 8)
        entries = np.frombuffer(file.read(len(memory) // 4096 * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())


@pytest.mark.gpu
def test_cuda_locks_and_copies_from_every_blob() -> None:
    layout = gated_layout(2048, 768, "bfloat16")  # 9 MiB
    arena = HostArena(layout, 300)
    lock = PageLock(arena.memory, chunks(arena.nbytes, layout.nbytes), page_lock.CudaLocker())
    while lock.more:
        assert lock.grow(), lock.reason
    assert lock.locked == arena.nbytes
    device = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
    for entry in range(0, 300, 7):
        arena.blob(entry)[:] = entry % 251
        host = torch.from_numpy(arena.blob(entry))
        assert host.is_pinned()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        assert bool((device == entry % 251).all())
    lock.close()
    assert not torch.from_numpy(arena.blob(0)).is_pinned()


@pytest.mark.gpu
def test_a_refusal_of_cuda_leaves_no_error_behind() -> None:
    arena = HostArena(LAYOUT, 8)
    lock = page_lock.lock_whole(arena.memory, page_lock.CudaLocker())
    again = page_lock.lock_whole(arena.memory, page_lock.CudaLocker())
    assert lock.locked
    assert not again.locked
    assert again.reason
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
    lock.close()
