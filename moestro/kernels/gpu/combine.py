"""Weighted sum of the experts' outputs, residual addition and the next norm, in one launch.

Owns: the kernel and its order of summation, which is that of the router's choice and so does not
depend on where an expert lay or when it came; a shared expert comes last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.norm import Norm, normalize, row_warps


@dataclass(frozen=True, slots=True)
class Beside:
    """What a shared expert gives, to be multiplied by the sigmoid of `gate` if there is one."""

    added: torch.Tensor  # [B, H]
    gate: torch.Tensor | None  # [B, 1], logits


@triton.jit
def _combine(
    z,
    weights,
    beside,
    gate,
    residual,
    norm_weight,
    norm_bias,
    out,
    eps,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BESIDE: tl.constexpr,
    GATED: tl.constexpr,
    SCALE: tl.constexpr,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BIAS: tl.constexpr,
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
    if BESIDE:
        shared = tl.load(beside + here, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            shared = shared * tl.sigmoid(tl.load(gate + row).to(tl.float32))
        total += shared
    if SCALE != 1.0:
        total = total * SCALE
    rounded = (old + total).to(residual.dtype.element_ty)
    tl.store(residual + here, rounded, mask=inside)
    if NORM:
        by = tl.load(norm_weight + at, mask=inside, other=0.0)
        shift = by
        if BIAS:
            shift = tl.load(norm_bias + at, mask=inside, other=0.0)
        values = rounded.to(tl.float32)
        normed = normalize(
            values, by, shift, inside, eps, SIZE, CENTERED, ROUNDED, BIAS, out.dtype.element_ty
        )
        tl.store(out + here, normed, mask=inside)


def combine(
    z: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm | None,
    *,
    out: torch.Tensor | None,
    beside: Beside | None = None,
    scale: float = 1.0,
) -> None:
    """residual += scale * (sum over k of weights * z, and what is `beside`), summed in float32 in
    ascending k and rounded once; with `norm`, out = the norm of that.

    z [B * K, H] and weights [B, K] of any float dtype; residual, out [B, H], the norm's weights
    and `beside` of one float dtype; norm and out, both or neither. All contiguous. Rows of z whose
    weight is 0 are not read. `scale` is a constant of the model: a kernel is compiled for each.
    """
    rows, size = residual.shape
    k = weights.shape[1]
    gate = None if beside is None else beside.gate
    assert z.shape == (rows * k, size) and weights.shape[0] == rows
    assert (norm is None) == (out is None)
    assert z.is_contiguous() and weights.is_contiguous() and residual.is_contiguous()
    assert beside is None or (beside.added.shape == (rows, size) and beside.added.is_contiguous())
    assert gate is None or (gate.shape == (rows, 1) and gate.is_contiguous())
    block = triton.next_power_of_2(size)
    _combine[(rows,)](
        z,
        weights,
        z if beside is None else beside.added,
        z if gate is None else gate,
        residual,
        residual if norm is None else norm.weight,
        residual if norm is None or norm.bias is None else norm.bias,
        residual if out is None else out,
        0.0 if norm is None else norm.eps,
        K=k,
        SIZE=size,
        BLOCK=block,
        BESIDE=beside is not None,
        GATED=gate is not None,
        SCALE=scale,
        NORM=norm is not None,
        CENTERED=norm is not None and norm.centered,
        ROUNDED=norm is None or (norm.rounded and not norm.centered),
        BIAS=norm is not None and norm.bias is not None,
        num_warps=row_warps(block),
        **chained(),
    )
