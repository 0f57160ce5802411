"""What experts do between their two products, as data.

Owns: one class for each kind. Does not own: computing it (`kernels.reference` does).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """silu(gate) * up (arXiv 2002.05202)."""


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit` and up between -limit and
    limit before (GPT-OSS, arXiv 2508.10925)."""

    alpha: float
    limit: float


Activation = SwiGLU | ClampedSwiGLU
