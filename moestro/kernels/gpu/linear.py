"""A weight matrix applied to the few rows of a decode step.

Owns: two kernels that read each weight once, their shapes, and when they are worth it. Does not
own: products of many rows, which are the library's.

- `_by_row` multiplies and sums on plain cores; all loads of a program are in flight at once, the
  weights' before the activations'. For one row, or for few weights.
- `_by_tile` has the weights as the left operand of the tensor cores and the rows as the right one,
  padded to a tile, and keeps several steps of loads in flight. Its warps share the columns out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.experts import fitting_columns


@dataclass(frozen=True, slots=True)
class Shape:
    """How a launch is cut up. One program takes `rows` rows of the weight for `tokens` rows of x
    (powers of two), at most `columns` columns at a time. `stages` is how many steps of loads
    `_by_tile` has in flight, and tokens are then 8 or more; 0 is `_by_row`."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int = 0


MOST_COLUMNS = 8192  # that `serves` answers for
MOST_WEIGHTS = 1 << 25

# (most rows of x, most rows of the weight, shape), 16-bit weights.
SHAPES = (
    (8, 512, Shape(1, 2, 4096, 4)),
    (16, 512, Shape(2, 2, 4096, 4)),
    (1 << 30, 512, Shape(2, 4, 4096, 2)),
    (1, 1 << 30, Shape(1, 2, 4096, 8)),
    (8, 1 << 30, Shape(8, 16, 512, 4, 3)),
    (1 << 30, 1 << 30, Shape(16, 16, 512, 4, 3)),
)
# Tensor cores are of no use to exact float32.
WIDE_SHAPES = (
    (8, 512, Shape(1, 2, 4096, 8)),
    (1 << 30, 512, Shape(2, 2, 4096, 8)),
    (1, 1 << 30, Shape(1, 2, 4096, 8)),
    (1 << 30, 1 << 30, Shape(4, 2, 4096, 8)),
)


@triton.jit(do_not_specialize=["B"])
def _by_row(
    x,
    weight,
    bias,
    out,
    B,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    # [TOKENS, ROWS, COLUMNS], of which every thread holds the same columns of all rows and tokens.
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :, None]
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    at = tl.arange(0, COLUMNS)[None, None, :]
    lines = weight + row.to(tl.int64) * K
    total = tl.zeros((TOKENS, ROWS, COLUMNS), tl.float32)
    for first in tl.static_range(0, K, COLUMNS):
        column = first + at
        inside = column < K
        w = tl.load(
            lines + column, mask=(row < N) & inside, other=0.0, eviction_policy="evict_first"
        )
        if first == 0:
            begin(CHAINED)  # nobody writes weights, so reading them need not wait
        value = tl.load(x + token * K + column, mask=(token < B) & inside, other=0.0)
        total += w.to(tl.float32) * value.to(tl.float32)
    result = tl.sum(total, 2, keep_dims=True)
    if BIAS:
        result += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    place = out + token * N + row
    tl.store(place, result.to(out.dtype.element_ty), mask=(token < B) & (row < N))


@triton.jit(do_not_specialize=["B"])
def _by_tile(
    x,
    weight,
    bias,
    out,
    B,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
    PARTS: tl.constexpr,
):
    # [PARTS, ROWS, TOKENS]: each warp has columns of its own, since one chain of products over all
    # of them is slower than the memory.
    begin(CHAINED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.arange(0, PARTS)[:, None, None] * (COLUMNS // PARTS)
    at = tl.arange(0, COLUMNS // PARTS)
    lines = weight + row.to(tl.int64)[None, :, None] * K
    here = x + token[None, None, :] * K
    kept, real = (row < N)[None, :, None], (token < B)[None, None, :]
    total = tl.zeros((PARTS, ROWS, TOKENS), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + part + at[None, None, :]
        w = tl.load(lines + column, mask=kept & (column < K), other=0.0)
        column = first + part + at[None, :, None]
        values = tl.load(here + column, mask=real & (column < K), other=0.0)
        total = tl.dot(w, values, total, input_precision="ieee")
    result = tl.sum(total, 0)
    if BIAS:
        result += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    place = out + token[None, :] * N + row[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=(row < N)[:, None] & (token < B)[None, :])


def serves(rows: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether `linear` with `rows` rows of x and a weight [n, k] is expected to beat the library.

    One row, or a weight as short as a router's for a batch. Past that the library was as fast on
    an H200; so it may be for weights beyond the sizes tried there, which are left out as well.
    """
    if k > MOST_COLUMNS or n * k > MOST_WEIGHTS:
        return False
    few = 4 if dtype == torch.float32 else 1
    return rows <= few or (n <= 256 and rows * n <= 8192)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> None:
    """out = x weight^T + bias, summed in float32 and rounded once.

    x [B, K], weight [N, K], out [B, N] and bias [N], contiguous, of one float dtype; x may be of
    another one where the weight is float32. Any B is right, but it is made for those that `serves`
    names: past the tokens of a shape the weights are read again. A row of out does not depend on
    the other rows of x, except that B picks the kernel.
    """
    (count, k), n = x.shape, weight.shape[0]
    assert weight.shape == (n, k) and out.shape == (count, n)
    assert weight.dtype in (x.dtype, torch.float32)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    assert bias is None or bias.shape == (n,)
    chosen = shape or choose(count, n, weight.dtype)
    width = fitting_columns(k, chosen.columns)
    if not chosen.stages and k <= chosen.columns:
        width = triton.next_power_of_2(k)  # in one piece: idle threads, but no waiting
    kernel, parts = _by_row, {}
    if chosen.stages:
        kernel, parts = _by_tile, {"PARTS": chosen.warps}
        width = max(width, 16 * chosen.warps)
    kernel[(triton.cdiv(n, chosen.rows), triton.cdiv(count, chosen.tokens))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        count,
        N=n,
        K=k,
        BIAS=bias is not None,
        ROWS=chosen.rows,
        COLUMNS=width,
        TOKENS=chosen.tokens,
        num_warps=chosen.warps,
        num_stages=max(1, chosen.stages),
        **parts,
        **chained(),
    )


def choose(rows: int, n: int, dtype: torch.dtype) -> Shape:
    """The shape of a launch with `rows` rows of x and `n` of the weight."""
    table = WIDE_SHAPES if dtype == torch.float32 else SHAPES
    return next(shape for most, widest, shape in table if rows <= most and n <= widest)
