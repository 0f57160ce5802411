"""Takes a decode step's input apart, in one launch.

Owns: the kernel that turns one line of numbers for each row into what the layers' kernels read.
Does not own: which line means what (the caller passes their numbers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained


@dataclass(frozen=True, slots=True)
class Lines:
    """Which line of the input holds what."""

    token: int  # its id, used when source is negative
    source: int  # row of `sampled` that holds the token, or negative
    position: int
    place: int  # negative for a row that is not real
    column: int  # where `block` goes in the row's block table
    block: int
    temperature: int  # bits of a float64
    top_k: int
    rows: int  # how many rows are real, in the line's first place


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the kernels of a step of B rows read."""

    residual: torch.Tensor  # [B, H], embeddings of the tokens
    lengths: torch.Tensor  # int32 [B], 0 for a row that is not real
    temperature: torch.Tensor  # float32 [B]
    top_k: torch.Tensor  # int32 [B]
    rows: torch.Tensor  # int32 [1], how many are real


@triton.jit
def _prepare(
    given,
    sampled,
    embedding,
    tables,
    residual,
    lengths,
    temperature,
    top_k,
    rows,
    table_stride,
    R: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN: tl.constexpr,
    SOURCE: tl.constexpr,
    POSITION: tl.constexpr,
    PLACE: tl.constexpr,
    COLUMN: tl.constexpr,
    NEW: tl.constexpr,
    HEAT: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    row = tl.program_id(0)
    source = tl.load(given + SOURCE * R + row)
    known = tl.load(sampled + tl.maximum(source, 0))
    token = tl.where(source >= 0, known, tl.load(given + TOKEN * R + row))
    at = tl.arange(0, BLOCK)
    for lo in range(0, H, BLOCK):
        inside = lo + at < H
        values = tl.load(embedding + token * H + lo + at, mask=inside)
        if SCALE != 1.0:
            values = (values.to(tl.float32) * SCALE).to(residual.dtype.element_ty)
        tl.store(residual + row * H + lo + at, values, mask=inside)
    column = tl.load(given + COLUMN * R + row)
    tl.store(tables + row * table_stride + column, tl.load(given + NEW * R + row).to(tl.int32))
    length = tl.load(given + POSITION * R + row) + 1
    real = tl.load(given + PLACE * R + row) >= 0
    tl.store(lengths + row, tl.where(real, length, 0).to(tl.int32))
    heat = tl.load(given + HEAT * R + row).to(tl.float64, bitcast=True)
    tl.store(temperature + row, heat.to(tl.float32))
    tl.store(top_k + row, tl.load(given + TOP_K * R + row).to(tl.int32))
    tl.store(rows, tl.load(given + ROWS * R).to(tl.int32))  # every program the same


def prepare(
    given: torch.Tensor,
    lines: Lines,
    sampled: torch.Tensor,
    embedding: torch.Tensor,
    tables: torch.Tensor,
    *,
    out: Prepared,
    scale: float = 1.0,
) -> None:
    """Fill `out`, embeddings times `scale`, and enter new blocks into the tables.

    given int64 [lines, R] with R >= B; sampled int64 [R], by the last step; embedding [V, H];
    tables int32 [R, n], whose column `column` of each row is overwritten. All contiguous.
    `scale` is a constant of the model: a kernel is compiled for each.
    """
    count, hidden = out.residual.shape
    assert given.is_contiguous() and embedding.is_contiguous() and tables.stride(1) == 1
    _prepare[(count,)](
        given,
        sampled,
        embedding,
        tables,
        out.residual,
        out.lengths,
        out.temperature,
        out.top_k,
        out.rows,
        tables.stride(0),
        R=given.shape[1],
        H=hidden,
        BLOCK=min(2048, triton.next_power_of_2(hidden)),
        TOKEN=lines.token,
        SOURCE=lines.source,
        POSITION=lines.position,
        PLACE=lines.place,
        COLUMN=lines.column,
        NEW=lines.block,
        HEAT=lines.temperature,
        TOP_K=lines.top_k,
        ROWS=lines.rows,
        SCALE=scale,
        num_warps=4,
        **chained(),
    )
