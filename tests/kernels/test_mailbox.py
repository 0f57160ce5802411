"""The mailbox between a device and the expert worker; this thread plays the device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from moestro.kernels import cpu_experts
from moestro.kernels import mailbox as fields
from moestro.kernels.cpu_experts import CpuExperts
from moestro.kernels.mailbox import Mailbox, MailboxShape
from tests.kernels.blobs import Blobs, assert_close

HIDDEN, INNER, EXPERTS = 64, 32, 6
SHAPE = MailboxShape(max_rows=4, top_k=3, hidden=HIDDEN, max_experts=EXPERTS, dtype=torch.float32)


class Device:
    """What the GPU does."""

    def __init__(self, box: Mailbox, blobs: Blobs) -> None:
        self.box, self.blobs, self.number = box, blobs, 0

    def post(self, sizes: list[int], rows: int = 4, number: int | None = None) -> torch.Tensor:
        """Write a job and its number; the result to expect in z, NaN where none is written."""
        box, routes = self.box, sum(sizes)
        draw = np.random.default_rng(routes)
        chosen = draw.permutation(rows * SHAPE.top_k)[:routes].astype(np.int32)
        box.x.normal_()
        box.z.fill_(torch.nan)
        box.address[: len(sizes)] = torch.tensor(self.blobs.addresses[: len(sizes)])
        box.lo[: len(sizes) + 1] = torch.tensor(np.cumsum([0, *sizes]))
        box.route[:routes] = torch.from_numpy(chosen)
        box.header[fields.ROWS] = rows
        box.header[fields.EXPERTS] = len(sizes)
        box.header[fields.ROUTES] = routes
        self.release(number)
        expected = torch.full(box.z.shape, torch.nan, dtype=torch.float64)
        if routes:
            source = (chosen // SHAPE.top_k).astype(np.int32)
            expected[torch.from_numpy(chosen).long()] = self.blobs.expected(sizes, source, box.x)
        return expected

    def release(self, number: int | None = None) -> None:
        self.number = self.number + 1 if number is None else number
        self.box.header[fields.POSTED] = self.number

    def wait(self, seconds: float = 10.0) -> int | None:
        """The error code once the job is answered; None when it is not in time."""
        until = time.monotonic() + seconds
        while int(self.box.answer[fields.DONE]) != self.number:
            if time.monotonic() > until:
                return None
        return int(self.box.answer[fields.ERROR])


@pytest.fixture(scope="module")
def blobs() -> Blobs:
    return Blobs(EXPERTS, HIDDEN, INNER, torch.float32)


@pytest.fixture
def pool(blobs: Blobs) -> Iterator[CpuExperts]:
    if (reason := cpu_experts.missing()) is not None:
        pytest.skip(reason)
    pool = CpuExperts(blobs.shape)
    pool.start(2)
    yield pool
    pool.stop()


@pytest.fixture
def device(pool: CpuExperts, blobs: Blobs) -> Device:
    box = _mailbox(SHAPE)
    pool.attach(box, [(8, 64), blobs.range])
    return Device(box, blobs)


def _mailbox(shape: MailboxShape) -> Mailbox:
    memory = torch.full((shape.nbytes + fields.LINE,), 255, dtype=torch.uint8)
    start = -memory.data_ptr() % fields.LINE
    return Mailbox.over(memory[start : start + shape.nbytes], shape)


def test_jobs_one_after_another(device: Device, pool: CpuExperts, blobs: Blobs) -> None:
    for sizes, number in (([1], 1), ([2, 0, 5, 1], 2), ([], 9), ([1] * EXPERTS, -3), ([12], 4)):
        expected = device.post(sizes, number=number)
        assert device.wait() == 0
        written = ~expected.isnan()
        assert torch.equal(device.box.z.isnan(), ~written)
        if sizes:
            assert_close(device.box.z[written], expected[written])
    stats = device.box.stats
    assert int(stats[fields.JOBS]) == 5
    assert int(stats[fields.BYTES]) == (1 + 4 + 0 + 6 + 1) * blobs.shape.nbytes
    assert int(stats[fields.BUSY_NS]) > 0
    total = pool.stats()
    assert (total.jobs, total.bytes) == (5, int(stats[fields.BYTES]))


def test_a_superseded_job_leaves_no_trace(device: Device, pool: CpuExperts) -> None:
    pool.pause()
    device.post([12])
    time.sleep(0.005)
    assert device.wait(0) is None, "a paused worker answered"
    expected = device.post([1, 1])
    pool.resume()
    assert device.wait() == 0
    assert torch.equal(device.box.z.isnan(), expected.isnan())
    assert int(device.box.stats[fields.JOBS]) == 1


def test_the_next_job_after_an_abandoned_wait(device: Device) -> None:
    for _ in range(30):
        device.post([4] * 3)  # nobody waits
        expected = device.post([1, 2])
        assert device.wait() == 0
        rows = ~expected.isnan()
        assert_close(device.box.z[rows], expected[rows])


def _header(index: int, value: int) -> Callable[[Mailbox], None]:
    return lambda box: box.header[index].fill_(value)


WRONG: list[tuple[int, Callable[[Mailbox], object]]] = [
    (1, _header(fields.ROWS, 5)),
    (1, _header(fields.ROWS, -1)),
    (2, _header(fields.EXPERTS, EXPERTS + 1)),
    (2, _header(fields.EXPERTS, -(2**31))),
    (3, _header(fields.ROUTES, 13)),
    (3, _header(fields.ROUTES, -1)),
    (3, _header(fields.ROWS, 0)),
    (4, _header(fields.ROUTES, 5)),
    (4, lambda box: box.lo[0].fill_(1)),
    (4, lambda box: box.lo[1].fill_(7)),
    (4, lambda box: box.lo[1].fill_(-1)),
    (5, lambda box: box.route[2].fill_(12)),
    (5, lambda box: box.route[2].fill_(-1)),
    (6, lambda box: box.address[1].fill_(0)),
    (6, lambda box: box.address[1].fill_(8)),
    (6, lambda box: box.address[1].add_(EXPERTS * 2**20)),
]


@pytest.mark.parametrize(("code", "spoil"), WRONG)
def test_a_wrong_job_is_refused(
    device: Device, code: int, spoil: Callable[[Mailbox], object]
) -> None:
    posted = device.box.header[fields.POSTED].clone()
    device.post([2, 2, 2], number=int(posted))  # the same number: not seen yet
    spoil(device.box)
    device.release(7)
    assert device.wait() == code
    assert code in fields.ERRORS
    assert device.box.z.isnan().all()
    device.post([1])
    assert device.wait() == 0, "it does not serve any more"


def test_pause_rests_and_resume_serves(device: Device, pool: CpuExperts) -> None:
    device.post([1])
    pool.pause()
    assert device.wait(0) in (0, None)
    beat = int(device.box.stats[fields.BEAT])
    device.post([1, 1])
    time.sleep(0.005)
    assert int(device.box.stats[fields.BEAT]) == beat
    assert device.wait(0) is None
    pool.pause()  # once more is nothing
    pool.resume()
    assert device.wait() == 0
    until = time.monotonic() + 5
    while int(device.box.stats[fields.BEAT]) == beat:
        assert time.monotonic() < until, "no heartbeat"


@pytest.mark.parametrize("paused", [False, True])
def test_stop_while_there_is_work(device: Device, pool: CpuExperts, paused: bool) -> None:
    if paused:
        pool.pause()
    device.post([2] * EXPERTS)
    before = len(os.listdir("/proc/self/task"))
    pool.stop()
    assert len(os.listdir("/proc/self/task")) == before - 2
    assert not paused or device.wait(0) is None


def test_calls_and_jobs_share_the_pool(device: Device, pool: CpuExperts, blobs: Blobs) -> None:
    lines = np.arange(4, dtype=np.int32)
    x, z = torch.randn(4, HIDDEN), torch.empty(4, HIDDEN)
    for _ in range(20):
        expected = device.post([3, 3])
        pool.compute(blobs.addresses[:2], [0, 1, 4], lines, lines, x, z)
        assert_close(z, blobs.expected([1, 3], lines, x))
        assert device.wait() == 0
        rows = ~expected.isnan()
        assert_close(device.box.z[rows], expected[rows])


def test_fields_do_not_overlap_and_start_on_lines() -> None:
    shape = MailboxShape(3, 2, 5, 7, torch.bfloat16)
    at = 0
    for offset, dtype, size in shape.offsets().values():
        assert offset >= at
        assert offset % fields.LINE == 0
        at = offset + torch.Size(size).numel() * dtype.itemsize
    assert at <= shape.nbytes
    with pytest.raises(ValueError, match=f"takes {shape.nbytes} bytes"):
        Mailbox.over(torch.zeros(shape.nbytes - 1, dtype=torch.uint8), shape)
