"""The device's end of the mailbox, with Python as the worker."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moestro.kernels.gpu.cpu_share import CpuLink, collect
from moestro.kernels.gpu.fetch import fetch
from moestro.kernels.gpu.tables import Fault, LayerWork, StepLog
from moestro.kernels.mailbox import (
    DONE,
    ERROR,
    EXPERTS,
    LAYER,
    POSTED,
    ROUTES,
    Mailbox,
    MailboxShape,
)

K, WIDTH = 2, 48


class Worker(threading.Thread):
    """Answers one job: z of a route is its number on top of the row's x, times ten."""

    def __init__(self, box: Mailbox, number: int, *, error: int = 0) -> None:
        super().__init__(daemon=True)
        self._box, self._number, self._error = box, number, error
        self.seen: dict[str, list[int]] = {}

    def run(self) -> None:
        box, header = self._box, self._box.header
        deadline = time.monotonic() + 60
        while int(header[POSTED]) != self._number and time.monotonic() < deadline:
            time.sleep(0.001)
        experts, routes = int(header[EXPERTS]), int(header[ROUTES])
        self.seen = {
            "layer": [int(header[LAYER])],
            "address": box.address[:experts].tolist(),
            "lo": box.lo[: experts + 1].tolist(),
            "route": box.route[:routes].tolist(),
        }
        for route in self.seen["route"]:
            box.z[route] = 10 * box.x[route // K] + route
        box.answer[ERROR] = self._error
        box.answer[DONE] = self._number


def parts(rows: int, device: str) -> tuple[CpuLink, LayerWork, StepLog, torch.Tensor]:
    shape = MailboxShape(max_rows=8, top_k=K, hidden=WIDTH, max_experts=16, dtype=torch.float32)
    pinned = device == "cuda"
    box = Mailbox.over(torch.empty(shape.nbytes + 64, dtype=torch.uint8, pin_memory=pinned), shape)
    work = LayerWork.empty(16, rows * K, device)
    log = StepLog.empty(3, work.groups, device)
    return CpuLink.over(box, device), work, log, torch.zeros(2, dtype=torch.int32, device=device)


def leave(work: LayerWork, share: dict[int, list[int]]) -> None:
    """Leave experts with these addresses and routes to the CPU, as `acquire` would."""
    lo, order = 0, []
    for n, (address, routes) in enumerate(share.items()):
        work.cpu_src[n], work.cpu_start[n], work.cpu_lo[n] = address, lo + 1, lo
        order += routes
        lo += len(routes)
    work.cpu_lo[len(share)] = lo
    work.n_cpu[0] = len(share)
    work.order[1 : 1 + lo] = torch.tensor(order, dtype=torch.int32)


def post(layer: int, x: torch.Tensor, work: LayerWork, link: CpuLink, log: StepLog) -> None:
    """Only the CPU's part of a fetch: there is nothing to copy."""
    slab = torch.zeros(1, 256, dtype=torch.uint8, device=x.device)
    fetch(layer, work, slab, 256, log, cpu=link, x=x)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_share_goes_there_and_its_rows_come_back(device: str, rows: int) -> None:
    link, work, log, fault = parts(rows, device)
    x = torch.arange(rows * WIDTH, dtype=torch.float32, device=device).view(rows, WIDTH)
    for number, share in enumerate(({4096: [0]}, {512: [rows * K - 1], 256: [0]}), 1):
        if rows == 1:
            share = dict([next(iter(share.items()))])
        leave(work, share)
        z = torch.full((rows * K, WIDTH), -1.0, device=device)
        worker = Worker(link.box, number)
        worker.start()
        post(number, x, work, link, log)
        collect(number, work, link, fault, log, z=z, longest_wait=1 << 30)
        worker.join()
        routes = [route for each in share.values() for route in each]
        assert worker.seen["layer"] == [number]
        assert worker.seen["address"] == list(share)
        assert worker.seen["route"] == routes
        assert worker.seen["lo"] == [0, *range(1, len(routes) + 1)]
        expected = torch.full((rows * K, WIDTH), -1.0, device=device)
        for route in routes:
            expected[route] = 10 * x[route // K] + route
        assert z.equal(expected)
        assert fault.tolist() == [Fault.NONE, 0]


def test_nothing_left_to_the_cpu_is_not_posted(device: str) -> None:
    link, work, log, fault = parts(2, device)
    z = torch.full((2 * K, WIDTH), -1.0, device=device)
    post(0, torch.zeros(2, WIDTH, device=device), work, link, log)
    collect(0, work, link, fault, log, z=z, longest_wait=1)
    assert int(link.box.header[POSTED]) == 0
    assert bool((z == -1).all())
    assert fault.tolist() == [Fault.NONE, 0]


@pytest.mark.parametrize("error", [None, 5])
def test_no_answer_and_a_refusal_are_faults(device: str, error: int | None) -> None:
    link, work, log, fault = parts(2, device)
    leave(work, {4096: [3]})
    z = torch.full((2 * K, WIDTH), -1.0, device=device)
    post(2, torch.zeros(2, WIDTH, device=device), work, link, log)
    if error is not None:
        Worker(link.box, 1, error=error).run()
    collect(2, work, link, fault, log, z=z, longest_wait=1000)
    assert fault.tolist() == [Fault.NO_ANSWER, 2]
    assert bool((z == -1).all())


def test_the_first_fault_stays(device: str) -> None:
    link, work, log, fault = parts(2, device)
    fault[0], fault[1] = Fault.NO_SLOT, 1
    leave(work, {4096: [3]})
    post(2, torch.zeros(2, WIDTH, device=device), work, link, log)
    z = torch.zeros(2 * K, WIDTH, device=device)
    collect(2, work, link, fault, log, z=z, longest_wait=10)
    assert fault.tolist() == [Fault.NO_SLOT, 1]
