"""RMSNorm of decode and sweep rows, alone or fused with the residual addition before it.

Owns: both kernels and their launch shapes. The meaning is `reference.rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained


@triton.jit
def normalize(values, weight, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """values [BLOCK] float32, zero past SIZE -> values / rms * weight [BLOCK] in DTYPE: normalised
    in float32, rounded, then multiplied."""
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    rounded = (values * scale).to(DTYPE).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(DTYPE)


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + at
    scale = tl.load(weight + at, mask=inside, other=0.0)
    values = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row, rounded, mask=inside)
        values = rounded.to(tl.float32)
    normed = normalize(values, scale, eps, SIZE, out.dtype.element_ty)
    tl.store(out + row, normed, mask=inside)


def row_warps(block: int) -> int:
    """Warps of a program that holds one row of `block` elements in registers."""
    return min(8, max(1, block // 256))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor) -> None:
    """out = x / rms(x) * weight over the last dimension.

    x, out [B, H] and weight [H], contiguous, of one float dtype.
    """
    _launch(x, x, weight, eps, out, add=False)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor
) -> None:
    """residual += x in place, rounded to its dtype; out = residual / rms(residual) * weight.

    x, residual, out [B, H] and weight [H], contiguous, of one float dtype.
    """
    _launch(x, residual, weight, eps, out, add=True)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    add: bool,
) -> None:
    rows, size = x.shape
    assert x.is_contiguous() and residual.is_contiguous() and out.is_contiguous()
    assert residual.shape == out.shape == x.shape and weight.shape == (size,)
    block = triton.next_power_of_2(size)
    _rms_norm[(rows,)](
        x,
        residual,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=add,
        num_warps=row_warps(block),
        **chained(),
    )
