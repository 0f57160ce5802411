"""Hands a layer's share of missing experts to the host's processor, and takes its results.

Owns: the device's end of a `kernels.mailbox`. Does not own: which experts are left to the CPU
(`acquire` says so), or who computes them (`kernels.cpu_experts`).

`write_job`, a part of the kernel `fetch`, puts rows and routes into page-locked memory, then a job
number; the worker polls that number, computes, and writes the number back, which `collect` waits
for. Neither involves the host's Python. The wait has an end: a worker that does not answer makes
the step fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.tables import Fault, LayerWork, StepLog
from moestro.kernels.mailbox import (
    DONE,
    ERROR,
    EXPERTS,
    LAYER,
    POSTED,
    ROUTES,
    ROWS,
    SPENT,
    Mailbox,
)

COLLECTORS = 4  # programs that read results; each of them asks for the answer
WARPS = 8  # of each
TOGETHER = 8  # rows that each reads at a time
FIELDS = 1 + max(DONE, ERROR, SPENT)  # of an answer
LONGEST_WAIT = 500_000_000  # ns that the device waits for one layer's share
CHUNK = 256  # routes that are copied together
BLOCK = 1024  # values that are copied together


@dataclass(frozen=True, slots=True)
class CpuLink:
    """One mailbox as the device sees it."""

    box: Mailbox  # in memory that the device can read and write
    state: torch.Tensor  # int32 [2], on the device: programs that have written, last job's number

    @classmethod
    def over(cls, box: Mailbox, device: torch.device | str) -> CpuLink:
        """The device's end of a mailbox that nobody has used yet."""
        return cls(box, torch.zeros(2, dtype=torch.int32, device=device))

    def job(self, x: torch.Tensor, work: LayerWork) -> dict[str, Any]:
        """Arguments with which `write_job` offers the CPU's part of `work` for x [B, H]."""
        rows, width = x.shape
        box = self.box
        assert x.is_contiguous() and x.dtype == box.x.dtype and rows <= box.shape.max_rows
        assert work.groups <= box.shape.max_experts and work.routes <= box.shape.max_routes
        tensors = {
            "x": x,
            "order": work.order,
            "n_cpu": work.n_cpu,
            "cpu_src": work.cpu_src,
            "cpu_start": work.cpu_start,
            "cpu_lo": work.cpu_lo,
            "cpu_route": work.cpu_route,
            "state": self.state,
            "header": box.header,
            "address": box.address,
            "lo": box.lo,
            "route": box.route,
            "box_x": box.x,
        }
        sizes = {
            "B": rows,
            "H": width,
            "GROUPS": triton.next_power_of_2(work.groups + 1),
            "BLOCK": min(BLOCK, triton.next_power_of_2(width)),
            "CHUNK": CHUNK,
        }
        return tensors | sizes | _PLACES


_PLACES = {
    "POSTED": POSTED,
    "LAYER": LAYER,
    "ROWS": ROWS,
    "EXPERTS": EXPERTS,
    "ROUTES": ROUTES,
}
_TENSORS = "x order n_cpu cpu_src cpu_start cpu_lo cpu_route state header address lo route box_x"
_SIZES = ("B", "H", "GROUPS", "BLOCK", "CHUNK", *_PLACES)


def no_job(work: LayerWork) -> dict[str, Any]:
    """The same arguments where there is no mailbox; `write_job` is not compiled then."""
    return dict.fromkeys(_TENSORS.split(), work.order) | dict.fromkeys(_SIZES, 1)


@triton.jit
def write_job(
    layer,
    program,
    programs,
    x,
    order,
    n_cpu,
    cpu_src,
    cpu_start,
    cpu_lo,
    cpu_route,
    state,
    header,
    address,
    lo,
    route,
    box_x,
    B: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    POSTED: tl.constexpr,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One of several programs that put a job into the mailbox; nothing when the CPU has none."""
    experts = tl.load(n_cpu)
    if experts > 0:
        if program == 0:
            e = tl.arange(0, GROUPS)
            sources = tl.load(cpu_src + e, mask=e < experts, other=0)
            tl.store(address + e, sources, mask=e < experts)
            tl.store(lo + e, tl.load(cpu_lo + e, mask=e <= experts, other=0), mask=e <= experts)
            tl.store(header + LAYER, layer)
            tl.store(header + ROWS, B)
            tl.store(header + EXPERTS, experts)
            tl.store(header + ROUTES, tl.load(cpu_lo + experts))
        for nth in range(program, experts, programs):
            first = tl.load(cpu_lo + nth)
            count = tl.load(cpu_lo + nth + 1) - first
            source = tl.load(cpu_start + nth)
            for at in range(0, count, CHUNK):
                r = at + tl.arange(0, CHUNK)
                found = tl.load(order + source + r, mask=r < count, other=0)
                tl.store(route + first + r, found, mask=r < count)
                tl.store(cpu_route + first + r, found, mask=r < count)
        for row in range(program, B, programs):
            for first in tl.static_range(0, H, BLOCK):
                at = first + tl.arange(0, BLOCK)
                value = tl.load(x + row * H + at, mask=at < H, other=0.0)
                tl.store(box_x + row * H + at, value, mask=at < H)
        # All writes of a program come before its sign, and the number comes behind all signs.
        tl.debug_barrier()
        before = tl.atomic_add(state, 1, sem="acq_rel", scope="sys")
        if before == programs - 1:
            number = tl.load(state + 1) + 1
            tl.store(state + 1, number)
            tl.store(state, 0)
            tl.store(header + POSTED, number)


@triton.jit
def _look(answer, THREADS: tl.constexpr, FIELDS: tl.constexpr):
    """The worker's answer as it is now: a line of memory, which comes as a whole. Only few threads
    ask, since what is volatile is read once for each."""
    at = tl.arange(0, THREADS)
    return tl.load(answer + at, mask=at < FIELDS, other=0, volatile=True)


@triton.jit
def _field(seen, which: tl.constexpr, THREADS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, THREADS) == which, seen, 0), 0)


@triton.jit
def _collect(
    layer,
    z,
    n_cpu,
    cpu_lo,
    cpu_route,
    state,
    answer,
    box_z,
    fault,
    waiting,
    answered,
    spent,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    THREADS: tl.constexpr,
    FIELDS: tl.constexpr,
    DONE: tl.constexpr,
    ERROR: tl.constexpr,
    SPENT: tl.constexpr,
    LIMIT: tl.constexpr,
    LATE: tl.constexpr,
    CLOCK: tl.constexpr,
    TIMED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    experts = tl.load(n_cpu)
    if experts == 0:
        return
    number = tl.load(state + 1)
    seen = _look(answer, THREADS, FIELDS)
    if CLOCK:
        start = tl.extra.cuda.globaltimer()
        now = start
        while (_field(seen, DONE, THREADS) != number) & (now - start < LIMIT):
            seen = _look(answer, THREADS, FIELDS)
            now = tl.extra.cuda.globaltimer()
        if TIMED:
            tl.store(waiting + layer, start, mask=tl.program_id(0) == 0)
            tl.store(answered + layer, now, mask=tl.program_id(0) == 0)
            took = _field(seen, SPENT, THREADS)
            tl.store(spent + layer, took, mask=tl.program_id(0) == 0)
    else:
        looks = 0
        while (_field(seen, DONE, THREADS) != number) & (looks < LIMIT):
            seen = _look(answer, THREADS, FIELDS)
            looks += 1
    tl.debug_barrier()
    if (_field(seen, DONE, THREADS) != number) | (_field(seen, ERROR, THREADS) != 0):
        if (tl.program_id(0) == 0) & (tl.load(fault) == 0):
            tl.store(fault + 1, layer)
            tl.store(fault, LATE)
        return
    routes = tl.load(cpu_lo + experts)
    for lo in range(tl.program_id(0) * TOGETHER, routes, tl.num_programs(0) * TOGETHER):
        nth = lo + tl.arange(0, TOGETHER)
        route = tl.load(cpu_route + nth, mask=nth < routes, other=0).to(tl.int64)
        for first in tl.static_range(0, H, BLOCK):
            at = first + tl.arange(0, BLOCK)
            real = (nth < routes)[:, None] & (at < H)[None, :]
            here = route[:, None] * H + at[None, :]
            # Past the first cache: what lies there may be the layer's before.
            value = tl.load(box_z + here, mask=real, other=0.0, cache_modifier=".cg")
            tl.store(z + here, value, mask=real)


def collect(
    layer: int,
    work: LayerWork,
    link: CpuLink,
    fault: torch.Tensor,
    log: StepLog,
    *,
    z: torch.Tensor,
    longest_wait: int | None = None,
    timed: bool = False,
) -> None:
    """Wait for the CPU's share and put its rows into z [P, H], in the mailbox's dtype.

    Without an answer after `longest_wait` ns (default: LONGEST_WAIT; in Triton's interpreter so
    many looks), or with an error for an answer, there is a `Fault.NO_ANSWER` and z stays as it is.
    `timed` notes in `log` when the wait began and ended; no effect in the interpreter.
    """
    width = z.shape[1]
    box = link.box
    assert z.is_contiguous() and z.dtype == box.z.dtype and z.shape[0] == work.routes
    clock = not triton.knobs.runtime.interpret
    _collect[(COLLECTORS,)](
        layer,
        z,
        work.n_cpu,
        work.cpu_lo,
        work.cpu_route,
        link.state,
        box.answer,
        box.z,
        fault,
        log.waiting,
        log.answered,
        log.spent,
        H=width,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)),
        TOGETHER=TOGETHER,
        THREADS=32 * WARPS,
        FIELDS=FIELDS,
        DONE=DONE,
        ERROR=ERROR,
        SPENT=SPENT,
        LIMIT=LONGEST_WAIT if longest_wait is None else longest_wait,
        LATE=int(Fault.NO_ANSWER),
        CLOCK=clock,
        TIMED=timed and clock,
        num_warps=WARPS,
        **chained(),
    )
