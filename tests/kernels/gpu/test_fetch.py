"""Blobs copied by address."""

from __future__ import annotations

import pytest
import torch

from moestro.kernels.gpu import fetch
from moestro.kernels.gpu.tables import LayerWork, StepLog


def arena(blobs: int, nbytes: int, device: str) -> torch.Tensor:
    """Random host memory that the device can read."""
    host = torch.empty(blobs, nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    return host.random_(0, 256)


def ask(work: LayerWork, host: torch.Tensor, jobs: list[tuple[int, int]]) -> None:
    """Make (blob, slot) pairs the jobs."""
    work.n_jobs.fill_(len(jobs))
    for n, (blob, slot) in enumerate(jobs):
        work.job_src[n] = host[blob].data_ptr()
        work.job_slot[n] = slot


@pytest.mark.parametrize("nbytes", [256, 256 * 77, fetch.WORDS * 8 * 5])
@pytest.mark.parametrize("programs", [1, 3])
def test_each_blob_reaches_its_slot_and_nothing_else_changes(
    device: str, nbytes: int, programs: int
) -> None:
    host = arena(4, nbytes, device)
    slab = torch.full((7, nbytes), 0xAB, dtype=torch.uint8, device=device)
    work, log = LayerWork.empty(8, 8, device), StepLog.empty(2, 8, device)
    work.job_src.fill_(-7)  # of no meaning past n_jobs
    jobs = [(2, 6), (0, 1), (3, 4)]
    ask(work, host, jobs)
    fetch.fetch(1, work, slab, nbytes, log, programs=programs)
    for slot in range(7):
        blob = next((b for b, s in jobs if s == slot), None)
        expected = torch.full((nbytes,), 0xAB, dtype=torch.uint8) if blob is None else host[blob]
        assert torch.equal(slab[slot].cpu(), expected)


def test_no_jobs(device: str) -> None:
    slab = torch.full((2, 256), 0xAB, dtype=torch.uint8, device=device)
    work, log = LayerWork.empty(8, 8, device), StepLog.empty(1, 8, device)
    work.job_src.fill_(-7)
    fetch.fetch(0, work, slab, 256, log, timed=True)
    assert (slab == 0xAB).all()
    assert log.ended.tolist() == [0]


def test_more_jobs_than_are_copied_at_a_time(device: str) -> None:
    count = fetch.LANES + 9
    host = arena(count, 256, device)
    slab = torch.zeros(count, 256, dtype=torch.uint8, device=device)
    work, log = LayerWork.empty(64, 64, device), StepLog.empty(1, 64, device)
    ask(work, host, [(blob, count - 1 - blob) for blob in range(count)])
    fetch.fetch(0, work, slab, 256, log, programs=2)
    assert torch.equal(slab.cpu(), host.flip(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter has no timer")
def test_times_are_in_order(device: str) -> None:
    from moestro.kernels.gpu.acquire import acquire
    from moestro.kernels.gpu.tables import CacheTables

    host = arena(2, 1 << 20, device)
    tables = CacheTables.empty(1, 4, slots=4, ring=0, victims=4, device=device)
    tables.victims.copy_(torch.arange(4, dtype=torch.int32))
    tables.cursor.copy_(torch.tensor([0, 4], dtype=torch.int32))
    tables.source.copy_(torch.tensor([host[i % 2].data_ptr() for i in range(4)]))
    work, log = LayerWork.empty(4, 2, device), StepLog.empty(1, 2, device)
    slab = torch.zeros(4, 1 << 20, dtype=torch.uint8, device=device)
    ids = torch.tensor([[3, 0]], dtype=torch.int32, device=device)
    acquire(0, ids, tables, work=work, log=log, timed=True)
    fetch.fetch(0, work, slab, 1 << 20, log, timed=True)
    assert tables.fault.tolist() == [0, 0]
    assert torch.equal(slab[0].cpu(), host[0])
    assert torch.equal(slab[1].cpu(), host[1])
    assert 0 < int(log.ended[0]) - int(log.started[0]) < 1_000_000_000
