"""Frequencies of rotary embedding, with the scalings that reach long contexts.

Owns: the arithmetic of every `RopeScaling`. Does not own: rotating (`kernels.reference`).
Frequencies are a function of the longest sequence that the engine serves, never of one sequence's
length: so blocks of KV can be shared and a neighbour changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moestro.engine.models.rope import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    RopeSpec,
    Yarn,
)
from moestro.kernels import reference as ops


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding ready for use."""

    inverse: torch.Tensor  # float32 [dim / 2], radians a position
    magnitude: float = 1.0  # on cos and sin

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for positions [T], as `kernels.reference.rope` takes them."""
        return ops.rope_tables(positions, self.inverse, self.magnitude)


def build_rotary(spec: RopeSpec, longest: int) -> Rotary:
    """For an engine whose sequences have up to `longest` tokens."""
    scaling = spec.scaling
    plain = _inverse(spec.theta, spec.dim)
    match scaling:
        case Linear():
            return Rotary(plain / scaling.factor)
        case DynamicNTK():
            return Rotary(_inverse(_larger_base(spec, scaling, longest), spec.dim))
        case Yarn():
            return Rotary(_yarn(spec, scaling, plain), scaling.magnitude)
        case Llama3():
            return Rotary(_llama3(scaling, plain))
        case LongRope() if longest > scaling.trained:
            return Rotary(plain / torch.tensor(scaling.long), scaling.long_magnitude)
        case LongRope():
            return Rotary(plain / torch.tensor(scaling.short), scaling.short_magnitude)
    return Rotary(plain)


def _inverse(theta: float, dim: int) -> torch.Tensor:
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / theta**exponent


def _larger_base(spec: RopeSpec, scaling: DynamicNTK, longest: int) -> float:
    """The base that fits `longest` positions into what was trained."""
    longest = max(longest, scaling.trained)
    ratio = scaling.factor * longest / scaling.trained - (scaling.factor - 1)
    return float(spec.theta * ratio ** (spec.dim / (spec.dim - 2)))


def _yarn(spec: RopeSpec, scaling: Yarn, plain: torch.Tensor) -> torch.Tensor:
    def dimension(turns: float) -> float:
        """Which dimension turns so many times within what was trained."""
        length = scaling.trained / (turns * 2 * math.pi)
        return spec.dim * math.log(length) / (2 * math.log(spec.theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    if first == last:
        last += 0.001
    slowed = ((torch.arange(spec.dim // 2) - first) / (last - first)).clamp(0, 1)
    return plain / scaling.factor * slowed + plain * (1 - slowed)


def _llama3(scaling: Llama3, plain: torch.Tensor) -> torch.Tensor:
    turns = scaling.trained * plain / (2 * math.pi)  # within what was trained
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)
