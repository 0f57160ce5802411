"""Causal attention of one segment of a sweep over its paged KV.

Owns: the flash-attention forward kernel and its tile sizes. Does not own: writing the segment's own
KV, which must be in the pool before. Meaning: `reference.sweep_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_LOG2E = 1.4426950408889634
_FEW = 264  # programs; fewer would leave half of a large GPU idle, so tiles get smaller


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch parameters: queries and keys of a tile (powers of two >= 16), warps, stages."""

    rows: int
    cols: int
    warps: int
    stages: int


def sweep_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    *,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Attend from positions start, start + 1, ... to everything up to each, or its last `window`.

    q [T, h, d] and pool [blocks, layers, block_size, 2, g, d] of one dtype (float32, bfloat16 or
    float16), contiguous; a row of q may lie inside a wider row (its last two dimensions are
    contiguous). table int32 [n] plain block numbers covering positions 0 .. start + T - 1, of which
    those before every window are not read; scale > 0; out [T, h * d]; sinks [h] as in
    `attention_decode`. `tile` overrides the choice
    by dtype and size. FlashAttention-2 forward (arXiv 2307.08691). Returns `out`.
    """
    rows, heads, dim = q.shape
    _, _, block_size, _, kv_heads, _ = pool.shape
    assert q.stride(2) == 1 and q.stride(1) == dim and pool.is_contiguous()
    tile = tile or _tile(rows, heads, dim, q.dtype)
    # The last tile sees the most keys: it is started first, all heads of it side by side.
    _sweep_kernel[(heads, triton.cdiv(rows, tile.rows))](
        q,
        pool,
        table,
        out,
        q if sinks is None else sinks,
        layer,
        start,
        rows,
        scale * _LOG2E,
        window or 0,
        q.stride(0),
        out.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        SHARE=heads // kv_heads,
        DIM=dim,
        PAGE=block_size,
        M=tile.rows,
        N=tile.cols,
        D=max(16, triton.next_power_of_2(dim)),
        HAS_WINDOW=window is not None,
        SINKS=sinks is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _tile(rows: int, heads: int, dim: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(rows=32, cols=32, warps=4, stages=1)
    few = triton.cdiv(rows, 128) * heads < _FEW
    # Keys are found through the table: two loads deep, so five stages hold three tiles of keys.
    if dim > 128:
        return Tile(rows=64 if few else 128, cols=32, warps=4 if few else 8, stages=5)
    if few:
        return Tile(rows=64, cols=64, warps=4, stages=5)
    return Tile(rows=128, cols=128, warps=8, stages=5)


@triton.jit(do_not_specialize=["layer", "start", "count", "scale", "window"])
def _sweep_kernel(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    layer: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,  # queries
    scale: tl.tensor,
    window: tl.tensor,
    q_stride: tl.tensor,
    out_stride: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    token_stride: tl.tensor,
    value_offset: tl.tensor,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    member = row + tl.arange(0, M)
    dims = tl.arange(0, D)
    real = (member < count)[:, None] & (dims < DIM)[None, :]
    spot = member[:, None].to(tl.int64)
    column = head * DIM + dims[None, :]
    q = tl.load(q_ptr + spot * q_stride + column, mask=real, other=0.0)

    # Keys lo .. left need the window's mask, left .. right none, right .. hi the causal mask.
    first_at = start + row
    hi = tl.minimum(first_at + M, start + count)
    right = (first_at + 1) // N * N
    lo = 0
    left = 0
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(start - window + 1, 0)
        lo = tl.maximum(first_at - window + 1, 0) // N * N
        left = tl.maximum(first_at + M - window, 0)
        left = tl.minimum((left + N - 1) // N * N, right)
    kv = pool_ptr + tl.cast(layer, tl.int64) * layer_stride + head // SHARE * DIM
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634  # log2(e)
        best = tl.zeros([M], tl.float32) + sink
        total = tl.full([M], 1.0, tl.float32)
    at = start + member
    if HAS_WINDOW:
        acc, best, total = _span(
            acc, best, total, q, kv, table_ptr, at, lo, left, first, hi, scale, window,
            block_stride, token_stride, value_offset, DIM, PAGE, N, D, True, HAS_WINDOW,
        )  # fmt: skip
    acc, best, total = _span(
        acc, best, total, q, kv, table_ptr, at, left, right, first, hi, scale, window,
        block_stride, token_stride, value_offset, DIM, PAGE, N, D, False, HAS_WINDOW,
    )  # fmt: skip
    acc, best, total = _span(
        acc, best, total, q, kv, table_ptr, at, tl.maximum(left, right), hi, first, hi, scale,
        window, block_stride, token_stride, value_offset, DIM, PAGE, N, D, True, HAS_WINDOW,
    )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)  # a row past the last may see nothing
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + spot * out_stride + column, result, mask=real)


@triton.jit
def _span(
    acc: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    table_ptr: tl.tensor,
    at: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    value_offset: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    cols = tl.arange(0, N)
    dims = tl.arange(0, D)
    for begin in range(lo, hi, N):
        key_at = begin + cols
        if MASKED:
            here = (key_at >= first) & (key_at < end)
            block = tl.load(table_ptr + key_at // PAGE, mask=here, other=0)
        else:
            block = tl.load(table_ptr + key_at // PAGE)
        place = block.to(tl.int64) * block_stride + (key_at % PAGE) * token_stride
        spots = kv + place[:, None] + dims[None, :]
        if MASKED:
            both = here[:, None] & (dims < DIM)[None, :]
            keys = tl.load(spots, mask=both, other=0.0)
            values = tl.load(spots + value_offset, mask=both, other=0.0)
        elif DIM == D:
            keys = tl.load(spots)
            values = tl.load(spots + value_offset)
        else:
            inside = (dims < DIM)[None, :]
            keys = tl.load(spots, mask=inside, other=0.0)
            values = tl.load(spots + value_offset, mask=inside, other=0.0)
        scores = tl.dot(q, keys.T, input_precision="ieee")
        if MASKED:
            seen = key_at[None, :] <= at[:, None]
            if HAS_WINDOW:
                seen = seen & (key_at[None, :] > at[:, None] - window)
            scores = tl.where(seen, scores * scale, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            # With a window a row may have seen nothing yet.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - shift[:, None])
        else:
            higher = tl.maximum(best, tl.max(scores, 1) * scale)
            shift = higher
            weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        best = higher
    return acc, best, total
