"""Weighted sum of the experts' outputs, residual addition and the next norm, in one launch.

Owns: the kernel and its order of summation, which is that of the router's choice and so does not
depend on where an expert lay or when it came.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.norm import normalize, row_warps


@triton.jit
def _combine(
    z,
    weights,
    residual,
    norm_weight,
    out,
    eps,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    here = row * SIZE + at
    old = tl.load(residual + here, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(0, K):
        route = row * K + k
        weight = tl.broadcast_to(tl.load(weights + route).to(tl.float32), (BLOCK,))
        part = tl.load(z + route * SIZE + at, mask=inside & (weight != 0), other=0.0)
        total += weight * part.to(tl.float32)
    rounded = (old + total).to(residual.dtype.element_ty)
    tl.store(residual + here, rounded, mask=inside)
    if NORM:
        scale = tl.load(norm_weight + at, mask=inside, other=0.0)
        normed = normalize(rounded.to(tl.float32), scale, eps, SIZE, out.dtype.element_ty)
        tl.store(out + here, normed, mask=inside)


def combine(
    z: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    *,
    out: torch.Tensor | None,
) -> None:
    """residual += sum over k of weights * z, summed in float32 in ascending k and rounded once;
    with `norm_weight`, out = RMSNorm of that.

    z [B * K, H] and weights [B, K] of any float dtype; residual, out [B, H] and norm_weight [H] of
    one float dtype; norm_weight and out, both or neither. All contiguous. Rows of z whose weight is
    0 are not read.
    """
    rows, size = residual.shape
    k = weights.shape[1]
    assert z.shape == (rows * k, size) and weights.shape[0] == rows
    assert (norm_weight is None) == (out is None)
    assert z.is_contiguous() and weights.is_contiguous() and residual.is_contiguous()
    block = triton.next_power_of_2(size)
    _combine[(rows,)](
        z,
        weights,
        residual,
        residual if norm_weight is None else norm_weight,
        residual if out is None else out,
        eps,
        K=k,
        SIZE=size,
        BLOCK=block,
        NORM=norm_weight is not None,
        num_warps=row_warps(block),
        **chained(),
    )
