"""The gate of a dense MLP: what lies between its two products.

Owns: the kernel. The meaning is `reference.swiglu`; routed experts have it in their own kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained

BLOCK = 1024


@triton.jit
def _swiglu(wide, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    line = wide + row * (2 * SIZE) + at
    gate = tl.load(line, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(line + SIZE, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + at, result.to(out.dtype.element_ty), mask=inside)


def swiglu(wide: torch.Tensor, *, out: torch.Tensor) -> None:
    """out [B, I] = silu(gate) * up for wide [B, 2I] = [gate | up], in float32 and rounded once.

    Both contiguous, of one float dtype.
    """
    rows, size = out.shape
    assert wide.shape == (rows, 2 * size) and wide.is_contiguous() and out.is_contiguous()
    _swiglu[(rows, triton.cdiv(size, BLOCK))](
        wide, out, SIZE=size, BLOCK=BLOCK, num_warps=4, **chained()
    )
