"""Routes of a sweep sorted by expert, on the device.

Owns: the stable counting sort and its buffers. Does not own: what runs on the sorted routes
(`kernels.gpu.experts_sweep`). A route is token * K + k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_CHUNK = 128  # routes a program ranks by comparing all pairs
_SCANNED = 256  # chunks that are summed at a time: one kernel, however many there are


@dataclass(frozen=True, slots=True)
class Routes:
    """Where each expert's routes are: order[offsets[e] : offsets[e + 1]], ascending in each."""

    counts: torch.Tensor  # int32 [E + 1]; the last counts routes without an expert
    offsets: torch.Tensor  # int32 [E + 1]; the last is where routes without an expert begin
    order: torch.Tensor  # int32 [at least T * K]
    chunks: torch.Tensor  # int32 scratch

    @staticmethod
    def empty(routes: int, experts: int, device: torch.device | str) -> Routes:
        """Buffers for up to `routes` = T * K routes."""

        def ints(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        chunks = triton.cdiv(routes, _CHUNK)
        return Routes(
            ints(experts + 1), ints(experts + 1), ints(routes), ints(chunks * (experts + 1))
        )


def sort_routes(ids: torch.Tensor, experts: int, *, out: Routes) -> Routes:
    """Sort routes by expert, ties by route number; those without an expert (id -1) come last.

    ids int32 [T, K] contiguous, values -1 .. experts - 1. Fills counts, offsets and the first
    T * K of order. A counting sort in three launches: count in chunks, scan, place. Returns `out`.
    """
    routes = ids.numel()
    chunks = triton.cdiv(routes, _CHUNK)
    assert ids.is_contiguous() and out.order.numel() >= routes
    assert out.counts.numel() == experts + 1
    assert out.chunks.numel() >= chunks * (experts + 1)
    width = triton.next_power_of_2(experts + 1)
    _count_kernel[(chunks,)](ids, out.chunks, routes, chunks, experts, C=_CHUNK, E=width)
    _scan_kernel[(experts + 1,)](out.chunks, out.counts, chunks, STEP=_SCANNED)
    _place_kernel[(chunks,)](
        ids, out.chunks, out.counts, out.offsets, out.order, routes, chunks, experts,
        C=_CHUNK, E=width,
    )  # fmt: skip
    return out


@triton.jit
def _chunk(
    ids_ptr: tl.tensor, routes: tl.tensor, experts: tl.tensor, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Route numbers of this program and their experts; no expert is `experts`, no route -1."""
    route = tl.program_id(0) * C + tl.arange(0, C)
    found = tl.load(ids_ptr + route, mask=route < routes, other=-1)
    found = tl.where(found < 0, experts, found)
    return route, tl.where(route < routes, found, -1)


@triton.jit(do_not_specialize=["routes", "chunks", "experts"])
def _count_kernel(
    ids_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    routes: tl.tensor,
    chunks: tl.tensor,
    experts: tl.tensor,
    C: tl.constexpr,
    E: tl.constexpr,
) -> None:
    _, found = _chunk(ids_ptr, routes, experts, C)
    expert = tl.arange(0, E)
    count = tl.sum((found[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(chunks_ptr + expert * chunks + tl.program_id(0), count, mask=expert <= experts)


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    chunks_ptr: tl.tensor, counts_ptr: tl.tensor, chunks: tl.tensor, STEP: tl.constexpr
) -> None:
    """Per expert: counts of chunks to counts of the chunks before, and their sum."""
    expert = tl.program_id(0)
    before = tl.zeros([], tl.int32)
    for first in range(0, chunks, STEP):
        chunk = first + tl.arange(0, STEP)
        spots = chunks_ptr + expert * chunks + chunk
        count = tl.load(spots, mask=chunk < chunks, other=0)
        tl.store(spots, before + tl.cumsum(count, 0) - count, mask=chunk < chunks)
        before += tl.sum(count, 0)
    tl.store(counts_ptr + expert, before)


@triton.jit(do_not_specialize=["routes", "chunks", "experts"])
def _place_kernel(
    ids_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    order_ptr: tl.tensor,
    routes: tl.tensor,
    chunks: tl.tensor,
    experts: tl.tensor,
    C: tl.constexpr,
    E: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    route, found = _chunk(ids_ptr, routes, experts, C)
    expert = tl.arange(0, E)
    counts = tl.load(counts_ptr + expert, mask=expert <= experts, other=0)
    offsets = tl.cumsum(counts, 0) - counts
    if program == 0:
        tl.store(offsets_ptr + expert, offsets, mask=expert <= experts)
    before = tl.load(chunks_ptr + expert * chunks + program, mask=expert <= experts, other=0)
    mine = found[:, None] == expert[None, :]
    begin = tl.sum(tl.where(mine, (offsets + before)[None, :], 0), 1)
    other = program * C + tl.arange(0, C)
    twins = tl.load(ids_ptr + other, mask=other < routes, other=-1)
    twins = tl.where(twins < 0, experts, twins)
    earlier = (found[:, None] == twins[None, :]) & (other[None, :] < route[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    tl.store(order_ptr + begin + rank, route, mask=route < routes)
