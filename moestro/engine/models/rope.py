"""Rotary embedding as data: the base, how much of a head turns, and how long contexts are reached.

Owns: one class for each kind of scaling that checkpoints name in `rope_scaling` or
`rope_parameters`. Does not own: reading a config (`rope_config`) or frequencies (`layers.rotary`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Frequencies as trained."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Every frequency divided by `factor`: positions are interpolated (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicNTK:
    """A larger base for sequences longer than `trained` positions."""

    factor: float
    trained: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """High frequencies as trained, low ones divided by `factor`, a ramp between (arXiv 2309.00071).

    The ramp goes from the dimension that turns `beta_fast` times in `trained` positions to the one
    that turns `beta_slow` times, in whole dimensions if `truncate`. cos and sin are multiplied by
    `magnitude`. `on_scores` is a factor on attention scores, which only some families apply.
    """

    factor: float
    trained: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    magnitude: float
    on_scores: float = 1.0


@dataclass(frozen=True, slots=True)
class Llama3:
    """As YaRN, with the ramp over wavelengths: from `trained` / `low` to `trained` / `high`."""

    factor: float
    trained: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """A divisor for each frequency (arXiv 2402.13753): `short` when no sequence is longer than
    `trained` positions, else `long`. cos and sin are multiplied by the magnitude of that list.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    short_magnitude: float
    long_magnitude: float


RopeScaling = Unscaled | Linear | DynamicNTK | Yarn | Llama3 | LongRope


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over the first `dim` of a head's dimensions.

    A pair that turns together is dimensions i and i + dim / 2 in the checkpoint's projections, or
    2i and 2i + 1 when `interleaved`; loading reorders those, so that computing knows one layout.
    """

    theta: float
    dim: int
    scaling: RopeScaling = field(default_factory=Unscaled)
    interleaved: bool = False

    @property
    def trained(self) -> int | None:
        """Positions past which frequencies would be others; None when they are always the same."""
        return self.scaling.trained if isinstance(self.scaling, DynamicNTK | LongRope) else None

    def reach(self, positions: int) -> int:
        """The longest context, when the config says `positions`, which scalings extend."""
        if isinstance(self.scaling, Yarn | DynamicNTK):
            return max(positions, int(self.scaling.factor * self.scaling.trained))
        return positions
