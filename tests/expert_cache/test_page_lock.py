"""Page-locking: what is asked of the device, and what is said when it refuses."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch

from moestro.expert_cache import page_lock
from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.layout import gated_layout
from moestro.expert_cache.page_lock import LockReport, PageLock, chunks, populate
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


def test_chunks_are_locked_in_order_and_given_back_in_reverse() -> None:
    locker = FakeLocker()
    lock = PageLock(4096, [100, 100, 50], locker)
    assert lock.held
    assert lock.report.note is None
    assert lock.report.locked == lock.report.wanted == 250
    lock.close()
    lock.close()
    assert not lock.held
    assert [(name, at) for name, at, _ in locker.calls] == [
        *(("lock", at) for at in (4096, 4196, 4296)),
        *(("unlock", at) for at in (4296, 4196, 4096)),
    ]


def test_a_refused_chunk_gives_the_earlier_ones_back(limits: None) -> None:
    locker = FakeLocker(fails=2)
    lock = PageLock(0, [3 << 30, 1 << 30, 4 << 30, 1 << 30], locker)
    assert not lock.held
    assert locker.locked == {}
    assert [name for name, _, _ in locker.calls] == ["lock"] * 3 + ["unlock"] * 2
    report = lock.report
    assert (report.wanted, report.locked, report.reason) == (9 << 30, 4 << 30, "out of memory")
    assert (report.soft, report.hard) == (8 << 20, 64 << 20)
    note = report.note or ""
    for words in (
        "4.0 GiB of 9.0 GiB could be locked (out of memory)",
        "8.0 MiB (hard: 64.0 MiB)",
        "ulimit -l",
        "LimitMEMLOCK=infinity",
        "--ulimit memlock=-1",
    ):
        assert words in note


def test_an_exception_gives_the_earlier_chunks_back() -> None:
    locker = FakeLocker(fails=1, error=RuntimeError("no device"))
    with pytest.raises(RuntimeError, match="no device"):
        PageLock(0, [10, 10], locker)
    assert locker.locked == {}


def test_without_a_limit_memory_itself_is_short() -> None:
    note = LockReport(2 << 30, 1 << 30, "out of memory", None, None).note or ""
    assert "is unlimited" in note
    assert "--host-memory" in note
    assert "ulimit -l" not in note


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


def test_an_arena_is_brought_in_before_it_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_lock, "CHUNK", 2 * LAYOUT.nbytes)
    locker = FakeLocker()
    order: list[str] = []
    monkeypatch.setattr("moestro.expert_cache.arena.populate", lambda memory: order.append("in"))
    monkeypatch.setattr(locker, "unlock", lambda address: order.append("out"))
    arena = HostArena(LAYOUT, 40, pinned=True, locker=locker)
    assert order == ["in"]
    assert arena.pinned
    assert arena.lock_report is not None
    assert arena.lock_report.locked == arena.nbytes
    assert len(locker.locked) > 1
    assert min(locker.locked) == arena.address(0)
    assert sum(locker.locked.values()) == arena.nbytes
    arena.close()
    arena.close()
    assert not arena.pinned
    assert len(order) == 1 + len(locker.locked)


def test_an_arena_that_cannot_be_locked_serves_unpinned(limits: None) -> None:
    arena = HostArena(LAYOUT, 3, pinned=True, locker=FakeLocker(fails=0))
    assert not arena.pinned
    assert arena.lock_report is not None
    assert "0.0 MiB of 0.0 MiB" in (arena.lock_report.note or "")
    arena.blob(2)[:] = 7
    assert int(arena.blob(2)[-1]) == 7
    arena.close()


def test_an_arena_is_not_locked_unless_asked() -> None:
    arena = HostArena(LAYOUT, 2)
    assert not arena.pinned
    assert arena.lock_report is None
    arena.close()


def test_addresses_are_those_of_the_blobs() -> None:
    arena = HostArena(LAYOUT, 3)
    assert [arena.address(n) for n in range(3)] == [arena.blob(n).ctypes.data for n in range(3)]
    with pytest.raises(AssertionError):
        arena.address(3)


@pytest.mark.parametrize("supported", [True, False])
def test_populating_brings_every_page_in(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported:
        monkeypatch.setattr(page_lock, "_populate_write", lambda piece: False)
    monkeypatch.setattr(page_lock, "PIECE", 1 << 20)
    arena = HostArena(gated_layout(512, 512, "float32"), 4)  # 12 MiB
    memory = arena._blobs.reshape(-1)
    assert resident(memory) == 0
    populate(memory)
    assert resident(memory) == len(memory) // 4096
    assert not memory.any()


def resident(memory: np.ndarray) -> int:
    """Pages of `memory` that are present, by /proc/self/pagemap."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(memory.ctypes.data // 4096 * 8)
        entries = np.frombuffer(file.read(len(memory) // 4096 * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())


@pytest.mark.gpu
def test_cuda_locks_and_copies_from_every_blob() -> None:
    layout = gated_layout(2048, 768, "bfloat16")  # 9 MiB
    arena = HostArena(layout, 300, pinned=True)
    assert arena.pinned, arena.lock_report
    device = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
    for entry in range(0, 300, 7):
        arena.blob(entry)[:] = entry % 251
        host = torch.from_numpy(arena.blob(entry))
        assert host.is_pinned()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        assert bool((device == entry % 251).all())
    arena.close()
    assert not torch.from_numpy(arena.blob(0)).is_pinned()


@pytest.mark.gpu
def test_a_refusal_of_cuda_leaves_no_error_behind() -> None:
    arena = HostArena(LAYOUT, 2, pinned=True)
    again = PageLock(arena.address(0), [arena.nbytes], page_lock.CudaLocker())
    assert not again.held
    assert again.report.reason
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
    arena.close()
