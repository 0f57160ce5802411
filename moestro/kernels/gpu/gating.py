"""What an expert does beside its products, for all kernels that compute experts.

Owns: gating and biases inside a kernel. The meanings are `reference.swiglu` and
`reference.clamped_swiglu`; `expert_cache.layout` says where in a blob biases are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Gating:
    """SwiGLU, or with a `limit` > 0 the clamped one, of which `alpha` is a factor."""

    alpha: float = 1.0
    limit: float = 0.0

    def arguments(self) -> dict[str, Any]:
        """Constants of a kernel."""
        return {"ALPHA": self.alpha, "LIMIT": self.limit}


SWIGLU = Gating()


@triton.jit
def gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """float32 gate and up -> what goes into the second product. NaN stays NaN."""
    if LIMIT == 0.0:
        result = gate * tl.sigmoid(gate) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        result = gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)
    return result


@triton.jit
def load_bias(bias, row, kept):
    """Elements `row` of a bias as float32, 0 where they are not kept."""
    return tl.load(bias + row, mask=kept, other=0.0).to(tl.float32)


def bias_place(bias: int | None, size: int) -> int:
    """BIAS of a kernel: the element of a blob at which its bias begins, in elements of `size` bytes
    for the byte `bias`; -1 for none."""
    return -1 if bias is None else bias // size
