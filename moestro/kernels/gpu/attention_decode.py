"""Attention of one query a sequence over its paged KV, split along the sequence.

Owns: the split kernel, the kernel that joins the splits, and how many splits pay. Does not own:
writing KV (`kernels.gpu.rotary`) or block tables. Meaning: `reference.decode_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained

MOST_SPLITS = 64  # a row's partial results are joined in the registers of one program
_PROGRAMS_PER_SM = 4  # two are resident; twice that evens out rows of different length
_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch parameters: KV positions a step (a power of two >= 16), warps, pipeline stages."""

    cols: int
    warps: int
    stages: int


def choose_splits(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """How many programs share a row's KV: a power of two up to `MOST_SPLITS`.

    Depends on the bucket and not on lengths, so that one CUDA graph serves every length.
    """
    wanted = _PROGRAMS_PER_SM * multiprocessors // max(1, rows * kv_heads)
    return min(MOST_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def scratch_floats(rows: int, heads: int, head_dim: int, splits: int) -> int:
    """Elements of float32 scratch that `decode_attention` needs (none for one split)."""
    return 0 if splits == 1 else rows * heads * splits * (head_dim + 1)


def decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    *,
    out: torch.Tensor,
    scratch: torch.Tensor,
    splits: int,
    sinks: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Attend from the last position of each row to all of the row, or to its last `window`.

    q [B, h, d] and pool [blocks, layers, block_size, 2, g, d] of one dtype (float32, bfloat16 or
    float16), contiguous; tables int32 [B, n] plain block numbers; lengths int32 [B], the query's
    own position included; scale > 0; out [B, h * d]; scratch float32 of at least `scratch_floats`
    elements; splits a power of two up to `MOST_SPLITS`. A row of length 0 gives zeros. Table
    entries outside the visible range are not read. sinks [h]: one more score of each head, which
    takes its share of the softmax and stands for no token. Split-KV after Flash-Decoding (Dao et
    al. 2023), online softmax as in FlashAttention-2 (arXiv 2307.08691). Returns `out`.
    """
    rows, heads, dim = q.shape
    _, _, block_size, _, kv_heads, _ = pool.shape
    tile = tile or _tile(q.dtype, dim)
    many = splits > 1
    assert splits <= MOST_SPLITS and splits & (splits - 1) == 0
    assert q.is_contiguous() and pool.is_contiguous() and tables.stride(1) == 1
    assert scratch.numel() >= scratch_floats(rows, heads, dim, splits)
    lse = scratch[rows * heads * splits * dim :] if many else scratch
    share = heads // kv_heads
    _split_kernel[(kv_heads, splits, rows)](
        q,
        pool,
        tables,
        lengths,
        scratch if many else out,
        lse,
        q if sinks is None else sinks,
        layer,
        scale * _LOG2E,
        window or 0,
        tables.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        SHARE=share,
        KV_HEADS=kv_heads,
        SPLITS=splits,
        DIM=dim,
        PAGE=block_size,
        M=max(16, triton.next_power_of_2(share)),
        N=tile.cols,
        D=max(16, triton.next_power_of_2(dim)),
        HAS_WINDOW=window is not None,
        SINKS=sinks is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chained(),
    )
    if many:
        _join_kernel[(rows * heads,)](
            scratch,
            lse,
            lse if sinks is None else sinks,
            out,
            HEADS=heads,
            SINKS=sinks is not None,
            SPLITS=splits,
            DIM=dim,
            D=triton.next_power_of_2(dim),
            num_warps=4,
            **chained(),
        )
    return out


def _tile(dtype: torch.dtype, dim: int) -> Tile:
    if dtype == torch.float32:
        return Tile(cols=32, warps=4, stages=1)
    # Keys are found through the table: two loads deep, so five stages hold two tiles of keys.
    return Tile(cols=64 if dim <= 128 else 32, warps=4, stages=5)


@triton.jit(do_not_specialize=["layer", "scale", "window"])
def _split_kernel(
    q_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,  # SPLITS > 1: float32 [B, h, SPLITS, DIM]; else the result [B, h, DIM]
    lse_ptr: tl.tensor,  # float32 [B, h, SPLITS], base 2; -inf where a split saw nothing
    sinks_ptr: tl.tensor,  # of SPLITS == 1; else the join counts them
    layer: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    token_stride: tl.tensor,
    value_offset: tl.tensor,
    SHARE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    base = first // N * N
    span = (length - base + SPLITS * N - 1) // (SPLITS * N) * N
    lo = base + split * span
    hi = tl.minimum(lo + span, length)

    member = tl.arange(0, M)
    dims = tl.arange(0, D)
    cols = tl.arange(0, N)
    head = row.to(tl.int64) * (KV_HEADS * SHARE) + kv_head * SHARE + member
    real = (member < SHARE)[:, None] & (dims < DIM)[None, :]
    q = tl.load(q_ptr + head[:, None] * DIM + dims[None, :], mask=real, other=0.0)
    table = tables_ptr + row.to(tl.int64) * table_stride
    here = pool_ptr + tl.cast(layer, tl.int64) * layer_stride + kv_head * DIM + dims[None, :]

    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    if SINKS and SPLITS == 1:
        sink = tl.load(sinks_ptr + kv_head * SHARE + member, mask=member < SHARE, other=0.0)
        best = sink.to(tl.float32) * 1.4426950408889634  # log2(e)
        total = tl.full([M], 1.0, tl.float32)
    for start in range(lo, hi, N):
        at = start + cols
        seen = (at >= first) & (at < hi)
        block = tl.load(table + at // PAGE, mask=seen, other=0).to(tl.int64)
        place = block * block_stride + (at % PAGE) * token_stride
        both = seen[:, None] & (dims < DIM)[None, :]
        keys = tl.load(here + place[:, None], mask=both, other=0.0)
        values = tl.load(here + value_offset + place[:, None], mask=both, other=0.0)
        scores = tl.dot(q, keys.T, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        best = higher

    share = tl.where(total == 0.0, 1.0, total)
    result = acc / share[:, None]
    if SPLITS == 1:
        spot = head[:, None] * DIM + dims[None, :]
        tl.store(out_ptr + spot, result.to(out_ptr.dtype.element_ty), mask=real)
    else:
        slot = head * SPLITS + split
        lse = tl.where(total == 0.0, float("-inf"), best + tl.log2(share))
        tl.store(lse_ptr + slot, lse, mask=member < SHARE)
        if lo < hi:
            tl.store(out_ptr + slot[:, None] * DIM + dims[None, :], result, mask=real)


@triton.jit
def _join_kernel(
    parts_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, D)
    lse = tl.load(lse_ptr + head * SPLITS + split)
    best = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head % HEADS).to(tl.float32) * 1.4426950408889634  # log2(e)
        best = tl.maximum(best, sink)
    shift = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(lse - shift)
    # A split that saw nothing wrote nothing; a NaN is not -inf and must show.
    wrote = lse != float("-inf")
    spot = (head * SPLITS + split)[:, None] * DIM + dims[None, :]
    parts = tl.load(parts_ptr + spot, mask=wrote[:, None] & (dims < DIM)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - shift)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + head * DIM + dims, result.to(out_ptr.dtype.element_ty), mask=dims < DIM)
