"""Packed experts applied to the few rows of a decode step, and packed dense matrices likewise.

Owns: the kernels of `kernels.gpu.experts` for packed matrices, and their shapes. Weights stay
packed until they are in registers, so that what is read are the packed bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.experts import Shape
from moestro.kernels.gpu.gating import SWIGLU, Gating, bias_place, gated, load_bias
from moestro.kernels.gpu.packed import LEAST_GROUP, Place, load_flat, load_tile
from moestro.kernels.gpu.tables import LayerWork

# (most routes of a step, gate and up, down).
SHAPES = (
    (8, Shape(0, 4, 1024, 4), Shape(0, 8, 1024, 4)),
    (1 << 30, Shape(16, 32, 128, 4, 3), Shape(16, 64, 128, 4, 3)),
)
# Tensor cores are of no use to exact float32.
WIDE_SHAPES = (
    (8, Shape(0, 4, 1024, 4), Shape(0, 8, 1024, 4)),
    (1 << 30, Shape(16, 16, 32, 4, 2), Shape(16, 16, 32, 4, 2)),
)


@triton.jit
def _by_row(
    x,
    out,
    codes,
    scales,
    zeros,
    factor,
    plain,
    n_groups,
    group_slot,
    group_lo,
    order,
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
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    PER: tl.constexpr = 1 if KIND == 0 else 2
    COLUMNS: tl.constexpr = GROUPS * CODES * PER
    group = tl.program_id(1)
    slot = tl.load(group_slot + group).to(tl.int64)
    lo = tl.load(group_lo + group)
    hi = tl.load(group_lo + group + 1)
    if group >= tl.load(n_groups):
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < N
    codes += slot * STRIDE
    scales += slot * (STRIDE // SIZE)
    zeros += slot * STRIDE
    run = tl.arange(0, GROUPS)[:, None] * (CODES * PER)
    for at in range(lo, hi):
        route = tl.load(order + at)
        line = x + (route // SHARE) * D
        total = tl.zeros((ROWS, GROUPS, CODES), tl.float32)
        total_up = tl.zeros((ROWS, GROUPS, CODES), tl.float32)
        for first in tl.static_range(0, D, COLUMNS):
            column = first + run + tl.arange(0, CODES)[None, :] * PER
            low, high = load_tile(
                codes, scales, zeros, row, kept, first, D, ACROSS, BLOCK, GROUP, KIND, SCALE, ZEROS,
                GROUPS, CODES,
            )  # fmt: skip
            value = tl.load(line + column, mask=column < D, other=0.0).to(tl.float32)[None, :, :]
            total += low * value
            if GATED:
                low_up, high_up = load_tile(
                    codes + N * (D // PER), scales + DOWN * ACROSS, zeros + N // 2 * ACROSS, row,
                    kept, first, D, ACROSS, BLOCK, GROUP, KIND, SCALE, ZEROS, GROUPS, CODES,
                )  # fmt: skip
                total_up += low_up * value
            if PER == 2:
                value = tl.load(line + column + 1, mask=column + 1 < D, other=0.0)
                value = value.to(tl.float32)[None, :, :]
                total += high * value
                if GATED:
                    total_up += high_up * value
        result = tl.sum(tl.sum(total, 2), 1)
        if FACTOR:
            result *= tl.load(factor + slot * (STRIDE // 4))
        if BIAS >= 0:
            result += load_bias(plain + slot * ELEMENTS + BIAS, row, kept)
        if GATED:
            up = tl.sum(tl.sum(total_up, 2), 1)
            if FACTOR:
                up *= tl.load(factor + slot * (STRIDE // 4) + 1)
            if BIAS >= 0:
                up += load_bias(plain + slot * ELEMENTS + BIAS + N, row, kept)
            result = gated(result, up, ALPHA, LIMIT)
        tl.store(out + route * N + row, result.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _by_tile(
    x,
    out,
    codes,
    scales,
    zeros,
    factor,
    plain,
    n_groups,
    group_slot,
    group_lo,
    order,
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
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    PER: tl.constexpr = 1 if KIND == 0 else 2
    COLUMNS: tl.constexpr = GROUPS * CODES * PER
    dtype: tl.constexpr = x.dtype.element_ty
    group = tl.program_id(1)
    slot = tl.load(group_slot + group).to(tl.int64)
    lo = tl.load(group_lo + group)
    hi = tl.load(group_lo + group + 1)
    if group >= tl.load(n_groups):
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < N
    codes += slot * STRIDE
    scales += slot * (STRIDE // SIZE)
    zeros += slot * STRIDE
    for at in range(lo, hi, TOKENS):
        token = at + tl.arange(0, TOKENS)
        route = tl.load(order + token, mask=token < hi, other=0)
        real = (token < hi)[None, :]
        line = x + (route // SHARE)[None, :] * D
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        total_up = tl.zeros((ROWS, TOKENS), tl.float32)
        for first in range(0, D, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            values = tl.load(line + column[:, None], mask=real & (column < D)[:, None], other=0.0)
            w = load_flat(
                codes, scales, zeros, row, kept, first, dtype, D, ACROSS, BLOCK, GROUP, KIND, SCALE,
                ZEROS, GROUPS, CODES,
            )  # fmt: skip
            total = tl.dot(w, values, total, input_precision="ieee")
            if GATED:
                w_up = load_flat(
                    codes + N * (D // PER), scales + DOWN * ACROSS, zeros + N // 2 * ACROSS, row,
                    kept, first, dtype, D, ACROSS, BLOCK, GROUP, KIND, SCALE, ZEROS, GROUPS, CODES,
                )  # fmt: skip
                total_up = tl.dot(w_up, values, total_up, input_precision="ieee")
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
        place = out + route[None, :] * N + row[:, None]
        tl.store(place, total.to(out.dtype.element_ty), mask=kept[:, None] & real)


def expert_up(
    x: torch.Tensor,
    work: LayerWork,
    slab: torch.Tensor,
    k: int,
    place: Place,
    *,
    y: torch.Tensor,
    gating: Gating = SWIGLU,
    bias: int | None = None,
    shape: Shape | None = None,
) -> None:
    """y[route] = silu(gate x[route // k]) * (up x[route // k]) for the routes of every group.

    x [B, H]; y [B * k, I]; slab uint8 [S + R, nbytes], whose slots hold [gate; up] of [I, H] at
    `place`. All contiguous. Rows of y that belong to no group are not touched.
    `gating` is what stands for silu(gate) * up; `bias` the byte of a slot at which the biases
    [2I] of gate and up begin, in x's dtype.
    """
    assert y.shape[0] == work.routes == x.shape[0] * k and y.dtype == x.dtype
    assert (place.n, place.k, place.stack) == (y.shape[1], x.shape[1], 2)
    chosen = shape or _choose(work, x.dtype)[0]
    _launch(x, y, work, slab, place, chosen, share=k, gated=True, bias=bias, gating=gating)


def expert_down(
    y: torch.Tensor,
    work: LayerWork,
    slab: torch.Tensor,
    place: Place,
    *,
    z: torch.Tensor,
    bias: int | None = None,
    shape: Shape | None = None,
) -> None:
    """z[route] = down y[route] for the routes of every group.

    y [P, I]; z [P, H] in y's dtype or float32; slab uint8 [S + R, nbytes], whose slots hold down
    [H, I] at `place`. All contiguous. Rows of z that belong to no group are not touched.
    `bias`: the byte of a slot at which the bias [H] begins, in y's dtype.
    """
    assert z.shape[0] == y.shape[0] == work.routes and z.dtype in (y.dtype, torch.float32)
    assert (place.n, place.k, place.stack) == (z.shape[1], y.shape[1], 1)
    chosen = shape or _choose(work, y.dtype)[1]
    _launch(y, z, work, slab, place, chosen, share=1, gated=False, bias=bias)


def _choose(work: LayerWork, dtype: torch.dtype) -> tuple[Shape, Shape]:
    table = WIDE_SHAPES if dtype == torch.float32 else SHAPES
    return next((up, down) for most, up, down in table if work.routes <= most)


def _launch(
    x: torch.Tensor,
    out: torch.Tensor,
    work: LayerWork,
    slab: torch.Tensor,
    place: Place,
    shape: Shape,
    *,
    share: int,
    gated: bool,
    bias: int | None,
    gating: Gating = SWIGLU,
) -> None:
    assert x.is_contiguous() and out.is_contiguous() and slab.is_contiguous()
    columns = max(LEAST_GROUP, min(shape.columns, triton.next_power_of_2(place.k)))
    tokens = {"TOKENS": shape.tokens} if shape.tokens else {}
    kernel = _by_tile if shape.tokens else _by_row
    plain = slab.view(x.dtype)
    kernel[(triton.cdiv(place.n, shape.rows), work.groups)](
        x,
        out,
        plain=plain,
        n_groups=work.n_groups,
        group_slot=work.group_slot,
        group_lo=work.group_lo,
        order=work.order,
        SHARE=share,
        GATED=gated,
        BIAS=bias_place(bias, x.element_size()),
        ELEMENTS=plain.stride(0),
        ROWS=shape.rows,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **place.arguments(slab),
        **place.tile(columns),
        **tokens,
        **gating.arguments(),
        **chained(),
    )
