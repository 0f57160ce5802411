"""The experts' matrices applied to the few rows of a decode step.

Owns: two kernels, their shapes, and where a blob's matrices lie (as `expert_cache.layout` lays
them). Both read each weight once for up to 16 rows of an expert, and are bound by that reading:

- `_by_row` multiplies and sums on plain cores; all loads of a program are in flight at once. For
  one row an expert.
- `_by_tile` has the weights as the left operand of the tensor cores and up to 16 rows as the right
  one, and keeps several steps of loads in flight.

Either serves gate and up together (GATED), or down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.gating import SWIGLU, Gating, bias_place, gated, load_bias
from moestro.kernels.gpu.tables import LayerWork

ALIGN = 256  # bytes; on which each matrix of a blob starts


@dataclass(frozen=True, slots=True)
class Shape:
    """How a launch is cut up. One program takes `rows` rows of a matrix (of both with GATED) and
    all their columns, at most `columns` at a time. `tokens` routes go together in `_by_tile` (a
    power of two from 16); 0 is `_by_row`."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int = 1


# (most routes of a step, gate and up, down), 16-bit weights.
SHAPES = (
    (8, Shape(0, 4, 2048, 4), Shape(0, 8, 2048, 4)),
    (32, Shape(16, 32, 128, 2, 4), Shape(16, 64, 128, 4, 3)),
    (1 << 30, Shape(16, 64, 128, 4, 3), Shape(16, 64, 128, 4, 3)),
)
# Tensor cores are of no use to exact float32.
WIDE_SHAPES = (
    (8, Shape(0, 4, 2048, 8), Shape(0, 8, 2048, 4)),
    (1 << 30, Shape(16, 16, 32, 4, 2), Shape(16, 16, 32, 4, 2)),
)


@triton.jit
def _by_row(
    x,
    out,
    slab,
    n_groups,
    group_slot,
    group_lo,
    order,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    group = tl.program_id(1)
    slot = tl.load(group_slot + group).to(tl.int64)
    lo = tl.load(group_lo + group)
    hi = tl.load(group_lo + group + 1)
    if (group >= tl.load(n_groups)) | (slot < 0):  # none, or the CPU's
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight = slab + slot * STRIDE + OFFSET + row[:, None] * D
    for at in range(lo, hi):
        route = tl.load(order + at)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        total_up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.static_range(0, D, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = (row < N)[:, None] & (column < D)[None, :]
            w = tl.load(
                weight + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
            )
            if GATED:
                w_up = tl.load(
                    weight + N * D + column[None, :],
                    mask=inside,
                    other=0.0,
                    eviction_policy="evict_first",
                )
            value = tl.load(x + (route // SHARE) * D + column, mask=column < D, other=0.0)
            value = value.to(tl.float32)[None, :]
            total += w.to(tl.float32) * value
            if GATED:
                total_up += w_up.to(tl.float32) * value
        result = tl.sum(total, 1)
        if BIAS >= 0:
            result += load_bias(slab + slot * STRIDE + BIAS, row, row < N)
        if GATED:
            up = tl.sum(total_up, 1)
            if BIAS >= 0:
                up += load_bias(slab + slot * STRIDE + BIAS + N, row, row < N)
            result = gated(result, up, ALPHA, LIMIT)
        tl.store(out + route * N + row, result.to(out.dtype.element_ty), mask=row < N)


@triton.jit
def _by_tile(
    x,
    out,
    slab,
    n_groups,
    group_slot,
    group_lo,
    order,
    STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    group = tl.program_id(1)
    slot = tl.load(group_slot + group).to(tl.int64)
    lo = tl.load(group_lo + group)
    hi = tl.load(group_lo + group + 1)
    if (group >= tl.load(n_groups)) | (slot < 0):  # none, or the CPU's
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = (row < N)[:, None]
    weight = slab + slot * STRIDE + OFFSET + row[:, None] * D
    for at in range(lo, hi, TOKENS):
        token = at + tl.arange(0, TOKENS)
        route = tl.load(order + token, mask=token < hi, other=0)
        real = (token < hi)[None, :]
        line = x + (route // SHARE)[None, :] * D
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        total_up = tl.zeros((ROWS, TOKENS), tl.float32)
        for first in range(0, D, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < D
            values = tl.load(line + column[:, None], mask=real & inside[:, None], other=0.0)
            here = weight + column[None, :]
            w = tl.load(here, mask=kept & inside[None, :], other=0.0)
            total = tl.dot(w, values, total, input_precision="ieee")
            if GATED:
                w_up = tl.load(here + N * D, mask=kept & inside[None, :], other=0.0)
                total_up = tl.dot(w_up, values, total_up, input_precision="ieee")
        if BIAS >= 0:
            total += load_bias(slab + slot * STRIDE + BIAS, row, row < N)[:, None]
            if GATED:
                total_up += load_bias(slab + slot * STRIDE + BIAS + N, row, row < N)[:, None]
        if GATED:
            total = gated(total, total_up, ALPHA, LIMIT)
        place = out + route[None, :] * N + row[:, None]
        tl.store(place, total.to(out.dtype.element_ty), mask=kept & real)


def expert_up(
    x: torch.Tensor,
    work: LayerWork,
    slab: torch.Tensor,
    k: int,
    *,
    y: torch.Tensor,
    gating: Gating = SWIGLU,
    bias: int | None = None,
    shape: Shape | None = None,
) -> None:
    """y[route] = silu(gate x[route // k]) * (up x[route // k]) for the routes of every group.

    x [B, H]; y [B * k, I]; slab uint8 [S + R, nbytes], whose blobs begin with gate_up [2I, H] in
    x's dtype. All contiguous. Rows of y that belong to no group are not touched.
    `gating` is what stands for silu(gate) * up; `bias` the byte of a slot at which the biases
    [2I] of gate and up begin, in x's dtype.
    """
    size = y.shape[1]
    assert y.shape[0] == work.routes == x.shape[0] * k and y.dtype == x.dtype
    chosen = shape or _choose(work, x.dtype)[0]
    _launch(
        x, y, work, slab, chosen, offset=0, rows=size, share=k, gated=True, bias=bias, gating=gating
    )


def expert_down(
    y: torch.Tensor,
    work: LayerWork,
    slab: torch.Tensor,
    *,
    z: torch.Tensor,
    bias: int | None = None,
    shape: Shape | None = None,
) -> None:
    """z[route] = down y[route] for the routes of every group.

    y [P, I]; z [P, H] in y's dtype or float32; slab uint8 [S + R, nbytes], whose blobs hold down
    [H, I] in y's dtype behind gate_up [2I, H]. All contiguous. Rows of z that belong to no group
    are not touched.
    `bias`: the byte of a slot at which the bias [H] begins, in y's dtype.
    """
    size, inner = z.shape[1], y.shape[1]
    assert z.shape[0] == y.shape[0] == work.routes and z.dtype in (y.dtype, torch.float32)
    offset = triton.cdiv(2 * inner * size * y.element_size(), ALIGN) * ALIGN // y.element_size()
    chosen = shape or _choose(work, y.dtype)[1]
    _launch(y, z, work, slab, chosen, offset=offset, rows=size, share=1, gated=False, bias=bias)


def _choose(work: LayerWork, dtype: torch.dtype) -> tuple[Shape, Shape]:
    table = WIDE_SHAPES if dtype == torch.float32 else SHAPES
    return next((up, down) for most, up, down in table if work.routes <= most)


def _launch(
    x: torch.Tensor,
    out: torch.Tensor,
    work: LayerWork,
    slab: torch.Tensor,
    shape: Shape,
    *,
    offset: int,
    rows: int,
    share: int,
    gated: bool,
    bias: int | None,
    gating: Gating = SWIGLU,
) -> None:
    assert x.is_contiguous() and out.is_contiguous() and slab.is_contiguous()
    columns = x.shape[1]
    weights = slab.view(x.dtype)
    assert offset + (2 if gated else 1) * rows * columns <= weights.shape[1]
    tokens = {"TOKENS": shape.tokens} if shape.tokens else {}
    width = fitting_columns(columns, shape.columns)
    if not shape.tokens and columns <= shape.columns:
        width = triton.next_power_of_2(columns)  # in one piece: idle threads, but no waiting
    kernel = _by_tile if shape.tokens else _by_row
    kernel[(triton.cdiv(rows, shape.rows), work.groups)](
        x,
        out,
        weights,
        work.n_groups,
        work.group_slot,
        work.group_lo,
        work.order,
        STRIDE=weights.shape[1],
        OFFSET=offset,
        N=rows,
        D=columns,
        SHARE=share,
        GATED=gated,
        BIAS=bias_place(bias, x.element_size()),
        ROWS=shape.rows,
        COLUMNS=width,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **tokens,
        **gating.arguments(),
        **chained(),
    )


def fitting_columns(size: int, most: int) -> int:
    """The largest power of two from 16 to `most` of which whole multiples cover `size` with at
    most an eighth left over; if there is none, the next power of two up to `most`."""
    width = most
    while width >= 16:
        if triton.cdiv(size, width) * width * 8 <= size * 9:
            return width
        width //= 2
    return min(most, max(16, 1 << (size - 1).bit_length()))
