"""Packed experts of a sweep: grouped matrix products over thousands of routes.

Owns: the two products of `kernels.gpu.experts_sweep` for packed matrices, and their tile sizes.
Tiles, their plan and the walk over them are that module's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.experts_sweep import FIELDS, Shape, Tiles, find, grid
from moestro.kernels.gpu.gating import SWIGLU, Gating, bias_place, gated, load_bias
from moestro.kernels.gpu.packed import LEAST_GROUP, Place, load_flat

UP = {
    16: Shape(cols=64, depth=128, warps=4, stages=3, per_sm=2),
    32: Shape(cols=64, depth=128, warps=4, stages=3, per_sm=2),
    64: Shape(cols=64, depth=64, warps=4, stages=3, per_sm=2),
    128: Shape(cols=64, depth=64, warps=8, stages=3, per_sm=1),
}
DOWN = {
    16: Shape(cols=128, depth=128, warps=4, stages=3, per_sm=2),
    32: Shape(cols=128, depth=128, warps=4, stages=3, per_sm=2),
    64: Shape(cols=128, depth=64, warps=4, stages=3, per_sm=2),
    128: Shape(cols=128, depth=64, warps=8, stages=3, per_sm=1),
}
_FLOAT32 = Shape(cols=32, depth=32, warps=4, stages=2, per_sm=2)


def sweep_up(
    x: torch.Tensor,
    order: torch.Tensor,
    tiles: Tiles,
    slab: torch.Tensor,
    k: int,
    place: Place,
    *,
    y: torch.Tensor,
    gating: Gating = SWIGLU,
    bias: int | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """y[route] = silu(gate(x[route // k])) * up(x[route // k]) for every route of the tiles.

    x [T, H] float32, bfloat16 or float16; order int32 [T * k]; slab uint8 [slots, nbytes], a slot
    with [gate; up] of [I, H] at `place`; y [T * k, I] of x's dtype, of which the rows of other
    routes stay as they are. Weights are rounded to x's dtype, sums are in float32. `gating` and
    `bias` as in `experts_sweep.sweep_up`. Returns `y`.
    """
    assert (place.n, place.k, place.stack) == (y.shape[1], x.shape[1], 2)
    shape = shape or _shape(UP, tiles.rows, x.dtype)
    _launch(x, order, tiles, slab, place, y, shape, share=k, gated=True, bias=bias, gating=gating)
    return y


def sweep_down(
    y: torch.Tensor,
    order: torch.Tensor,
    tiles: Tiles,
    slab: torch.Tensor,
    place: Place,
    *,
    z: torch.Tensor,
    bias: int | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """z[route] = down(y[route]) for every route of the tiles.

    y [T * k, I] float32, bfloat16 or float16; slab uint8 [slots, nbytes], a slot with down of
    [H, I] at `place`; z [T * k, H] of y's dtype or float32, of which the rows of other routes stay
    as they are. `bias` as in `experts_sweep.sweep_down`. Returns `z`.
    """
    assert (place.n, place.k, place.stack) == (z.shape[1], y.shape[1], 1)
    shape = shape or _shape(DOWN, tiles.rows, y.dtype)
    _launch(y, order, tiles, slab, place, z, shape, share=1, gated=False, bias=bias)
    return z


def _shape(table: dict[int, Shape], rows: int, dtype: torch.dtype) -> Shape:
    return _FLOAT32 if dtype == torch.float32 else table[rows]


def _launch(
    x: torch.Tensor,
    order: torch.Tensor,
    tiles: Tiles,
    slab: torch.Tensor,
    place: Place,
    out: torch.Tensor,
    shape: Shape,
    *,
    share: int,
    gated: bool,
    bias: int | None,
    gating: Gating = SWIGLU,
) -> None:
    assert x.is_contiguous() and out.is_contiguous() and order.dtype == torch.int32
    depth = max(LEAST_GROUP, min(shape.depth, triton.next_power_of_2(place.k)))
    plain = slab.view(x.dtype)
    _kernel[grid(tiles, place.n, shape, x.device)](
        x,
        order,
        tiles.table,
        tiles.count,
        out,
        plain=plain,
        SHARE=share,
        GATED=gated,
        BIAS=bias_place(bias, x.element_size()),
        ELEMENTS=plain.stride(0),
        M=tiles.rows,
        COLS=shape.cols,
        FIELDS=FIELDS,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **place.arguments(slab),
        **place.tile(depth),
        **gating.arguments(),
    )


@triton.jit
def _kernel(
    x,
    order,
    table,
    count,
    out,
    codes,
    scales,
    zeros,
    factor,
    plain,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    ACROSS: tl.constexpr,
    DOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    ZEROS: tl.constexpr,
    FACTOR: tl.constexpr,
    SHARE: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    M: tl.constexpr,
    COLS: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
):
    PER: tl.constexpr = 1 if KIND == 0 else 2
    DEPTH: tl.constexpr = GROUPS * CODES * PER
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.cdiv(N, COLS)
    for work in range(tl.program_id(0), tl.load(count) * columns, tl.num_programs(0)):
        slot, column, routes, real = find(work, table, order, columns, M, FIELDS)
        row = column * COLS + tl.arange(0, COLS)
        kept = row < N
        own = codes + slot * STRIDE
        own_scales = scales + slot * (STRIDE // SIZE)
        own_zeros = zeros + slot * STRIDE
        lines = x + (routes // SHARE).to(tl.int64)[None, :] * D
        # Weights are the left operand, which may come from registers: as the right one Triton 3.6
        # cannot compile what was unpacked.
        total = tl.zeros([COLS, M], tl.float32)
        total_up = tl.zeros([COLS, M], tl.float32)
        for first in range(0, D, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            a = tl.load(lines + depth[:, None], mask=(depth < D)[:, None], other=0.0)
            w = load_flat(
                own, own_scales, own_zeros, row, kept, first, dtype, D, ACROSS, BLOCK, GROUP, KIND,
                SCALE, ZEROS, GROUPS, CODES,
            )  # fmt: skip
            total = tl.dot(w, a, total, input_precision="ieee")
            if GATED:
                w_up = load_flat(
                    own + N * (D // PER), own_scales + DOWN * ACROSS, own_zeros + N // 2 * ACROSS,
                    row, kept, first, dtype, D, ACROSS, BLOCK, GROUP, KIND, SCALE, ZEROS, GROUPS,
                    CODES,
                )  # fmt: skip
                total_up = tl.dot(w_up, a, total_up, input_precision="ieee")
        if FACTOR:
            total *= tl.load(factor + slot * (STRIDE // 4))
            if GATED:
                total_up *= tl.load(factor + slot * (STRIDE // 4) + 1)
        if BIAS >= 0:
            total += load_bias(plain + slot * ELEMENTS + BIAS, row, kept)[:, None]
            if GATED:
                total_up += load_bias(plain + slot * ELEMENTS + BIAS + N, row, kept)[:, None]
        if GATED:
            total = gated(total, total_up, ALPHA, LIMIT)
        spots = out + routes.to(tl.int64)[None, :] * N + row[:, None]
        tl.store(spots, total.to(out.dtype.element_ty), mask=kept[:, None] & real[None, :])
