"""A packed dense matrix applied to rows.

Owns: one kernel for few rows, which reads the packed bytes once, and one that unpacks some rows of
the matrix for a library's product of many. Does not own: which of the two is called.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.packed import LEAST_GROUP, Place, load_flat

TOKENS, ROWS, COLUMNS, WARPS, STAGES = 16, 16, 256, 4, 3
UNPACKED = 64  # rows and columns of the matrix that one program unpacks


@triton.jit(do_not_specialize=["B"])
def _linear(
    x,
    bias,
    out,
    B,
    PITCH: tl.constexpr,
    BIAS: tl.constexpr,
    codes,
    scales,
    zeros,
    factor,
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
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    COLUMNS: tl.constexpr = GROUPS * CODES * (1 if KIND == 0 else 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    kept, real = row < N, (token < B)[None, :]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = real & (column < D)[:, None]
        values = tl.load(x + token[None, :] * D + column[:, None], mask=mask, other=0.0)
        w = load_flat(
            codes, scales, zeros, row, kept, first, x.dtype.element_ty, D, ACROSS, BLOCK, GROUP,
            KIND, SCALE, ZEROS, GROUPS, CODES,
        )  # fmt: skip
        total = tl.dot(w, values, total, input_precision="ieee")
    if FACTOR:
        total *= tl.load(factor)
    if BIAS:
        total += tl.load(bias + row, mask=kept, other=0.0).to(tl.float32)[:, None]
    place = out + token[None, :] * PITCH + row[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=kept[:, None] & real)


@triton.jit
def _unpack(
    out,
    LO,
    HI,
    codes,
    scales,
    zeros,
    factor,
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
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
):
    COLUMNS: tl.constexpr = GROUPS * CODES * (1 if KIND == 0 else 2)
    first = tl.program_id(1) * COLUMNS
    row = LO + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = first + tl.arange(0, COLUMNS)
    kept = row < HI
    w = load_flat(
        codes, scales, zeros, row, kept, first, tl.float32, D, ACROSS, BLOCK, GROUP, KIND, SCALE,
        ZEROS, GROUPS, CODES,
    )  # fmt: skip
    if FACTOR:
        w *= tl.load(factor)
    place = out + (row - LO).to(tl.int64)[:, None] * D + column[None, :]
    tl.store(place, w.to(out.dtype.element_ty), mask=kept[:, None] & (column < D)[None, :])


def packed_linear(
    x: torch.Tensor,
    place: Place,
    data: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """out [B, n] = x [B, k] weight^T + bias [n], summed in float32; the weight [n, k] is at `place`
    of `data` uint8 [bytes]. Rows of out may lie apart. Made for few rows: past 16 the weight is
    read again."""
    count = x.shape[0]
    assert place.stack == 1 and x.shape[1] == place.k and out.shape == (count, place.n)
    assert x.is_contiguous() and out.stride(1) == 1
    columns = max(LEAST_GROUP, min(COLUMNS, triton.next_power_of_2(place.k)))
    _linear[(triton.cdiv(place.n, ROWS), triton.cdiv(count, TOKENS))](
        x,
        x if bias is None else bias,
        out,
        count,
        PITCH=out.stride(0),
        BIAS=bias is not None,
        ROWS=ROWS,
        TOKENS=TOKENS,
        num_warps=WARPS,
        num_stages=STAGES,
        **place.arguments(data.view(1, -1)),
        **place.tile(columns),
        **chained(),
    )


def unpack(place: Place, data: torch.Tensor, lo: int, hi: int, *, out: torch.Tensor) -> None:
    """Rows lo .. hi of the weight at `place` of `data` uint8 [bytes] into out [hi - lo, k]."""
    assert place.stack == 1 and out.shape == (hi - lo, place.k) and out.is_contiguous()
    columns = max(LEAST_GROUP, min(UNPACKED, triton.next_power_of_2(place.k)))
    _unpack[(triton.cdiv(hi - lo, UNPACKED), triton.cdiv(place.k, columns))](
        out,
        lo,
        hi,
        ROWS=UNPACKED,
        **place.arguments(data.view(1, -1)),
        **place.tile(columns),
    )
