"""The norm of decode and sweep rows, alone or fused with the residual addition before it.

Owns: both kernels and their launch shapes. RMSNorm means `reference.rms_norm`, LayerNorm torch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained


@dataclass(frozen=True, slots=True)
class Norm:
    """One norm: RMSNorm, or LayerNorm when `centered`, which alone may have a bias. `rounded`: to
    the dtype before it is multiplied by the weight, which LayerNorm is not."""

    weight: torch.Tensor  # [H]
    eps: float
    centered: bool = False
    rounded: bool = True
    bias: torch.Tensor | None = None  # [H]

    def __post_init__(self) -> None:
        assert self.centered or self.bias is None


@triton.jit
def normalize(
    values,
    weight,
    bias,
    inside,
    eps,
    SIZE: tl.constexpr,
    CENTERED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """values [BLOCK] float32, zero where not inside -> their norm in DTYPE, also rounded
    before it is multiplied by the weight if ROUNDED. `bias` counts with BIAS only."""
    if CENTERED:
        values = tl.where(inside, values - tl.sum(values, 0) / SIZE, 0.0)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    if ROUNDED:
        scaled = scaled.to(DTYPE).to(tl.float32)
    scaled = scaled * weight.to(tl.float32)
    if BIAS:
        scaled += bias.to(tl.float32)
    return scaled.to(DTYPE)


@triton.jit
def _norm(
    x,
    residual,
    weight,
    bias,
    out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    CENTERED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + at
    by = tl.load(weight + at, mask=inside, other=0.0)
    shift = by
    if BIAS:
        shift = tl.load(bias + at, mask=inside, other=0.0)
    values = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        if SCALE != 1.0:
            values = values * SCALE
        values += tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row, rounded, mask=inside)
        values = rounded.to(tl.float32)
    normed = normalize(
        values, by, shift, inside, eps, SIZE, CENTERED, ROUNDED, BIAS, out.dtype.element_ty
    )
    tl.store(out + row, normed, mask=inside)


def row_warps(block: int) -> int:
    """Warps of a program that holds one row of `block` elements in registers."""
    return min(8, max(1, block // 256))


def apply_norm(x: torch.Tensor, norm: Norm, *, out: torch.Tensor) -> None:
    """out = the norm of x over the last dimension.

    x, out [B, H] and the norm's weights, contiguous, of one float dtype.
    """
    _launch(x, x, norm, out, add=False, scale=1.0)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    *,
    out: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """residual += scale * x in place, rounded to its dtype; out = the norm of that.

    x, residual, out [B, H] and the norm's weights, contiguous, of one float dtype. `scale` is a
    constant of the model: a kernel is compiled for each.
    """
    _launch(x, residual, norm, out, add=True, scale=scale)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    out: torch.Tensor,
    *,
    add: bool,
    scale: float,
) -> None:
    rows, size = x.shape
    assert x.is_contiguous() and residual.is_contiguous() and out.is_contiguous()
    assert residual.shape == out.shape == x.shape and norm.weight.shape == (size,)
    block = triton.next_power_of_2(size)
    _norm[(rows,)](
        x,
        residual,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        out,
        norm.eps,
        SIZE=size,
        BLOCK=block,
        ADD=add,
        SCALE=scale,
        CENTERED=norm.centered,
        ROUNDED=norm.rounded and not norm.centered,
        BIAS=norm.bias is not None,
        num_warps=row_warps(block),
        **chained(),
    )
