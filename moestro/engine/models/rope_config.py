"""Reads what a config.json says about rotary embedding, in the old spelling or the new.

Owns: which keys each kind of scaling has. An unknown kind or key is an error that names it. The
meaning of the values is transformers' (`modeling_rope_utils`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.rope import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    RopeScaling,
    RopeSpec,
    Unscaled,
    Yarn,
)
from moestro.errors import ModelError

_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class _Said:
    """The parameters of one scaling. Ask for each, then see what is left."""

    left: dict[str, Any]
    positions: int  # max_position_embeddings
    trained: int  # the model's before it was extended
    dim: int
    own_magnitudes: bool

    def real(self, key: str, default: float | None = None) -> float:
        return _real(key, self.left.pop(key, default))

    def optional(self, key: str) -> float | None:
        return self.real(key) if key in self.left else None

    def reals(self, key: str) -> tuple[float, ...]:
        values = self.left.pop(key, None)
        if not isinstance(values, list) or len(values) != self.dim // 2:
            raise ModelError(f"config.json: rope {key} must be a list of {self.dim // 2} numbers")
        return tuple(_real(key, value) for value in values)


def _real(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"config.json: rope {key} must be a positive number, is {value!r}")
    return float(value)


def read_rope(
    config: HFConfig,
    head_dim: int,
    theta: float,
    positions: int,
    *,
    base: float | None = None,
    partial: float | None = None,
    interleaved: bool = False,
    own_magnitudes: bool = False,
) -> RopeSpec:
    """Rotary embedding as `config` describes it. `theta` and `partial` (how much of a head turns)
    are the family's defaults; None: it always turns whole. `base` overrules what is said of theta.
    `own_magnitudes`: LongRoPE comes with short_mscale and long_mscale. ModelError names what is not
    served.
    """
    said = _merged(config)
    kind = said.pop("rope_type", "default")
    if kind not in _KINDS:
        raise ModelError(
            f"config.json: rope type {kind!r} is not served; served are {', '.join(_KINDS)}"
        )
    if base is None:
        base = _one(config, said, "rope_theta", theta)
    said.pop("rope_theta", None)
    share = _one(config, said, _PARTIAL, 1.0 if partial is None else partial)
    if partial is None and share != 1.0:
        raise ModelError(f"config.json: {_PARTIAL} is {share}, only 1.0 is served")
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim or dim % 2:
        raise ModelError(f"config.json: {_PARTIAL} {share} turns {dim} of {head_dim} dimensions")
    trained = int(_real(_ORIGINAL, config.get(_ORIGINAL) or said.get(_ORIGINAL, positions)))
    if kind in ("yarn", "llama3", "longrope"):  # the others have no such key
        said.pop(_ORIGINAL, None)
    found = _Said(said, positions, trained, dim, own_magnitudes)
    scaling = _KINDS[kind](found)
    if said:
        raise ModelError(f"config.json: unknown rope keys {', '.join(sorted(said))}")
    return RopeSpec(base, dim, scaling, interleaved)


def _merged(config: HFConfig) -> dict[str, Any]:
    """rope_parameters and rope_scaling together, without nulls."""
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = {key: value for key, value in config.get(name, {}).items() if value is not None}
        kind = found.pop("type", None)
        found["rope_type"] = found.get("rope_type") or kind or "default"
        if found == {"rope_type": "default"}:
            continue
        for key, value in found.items():
            if merged.setdefault(key, value) != value:
                raise ModelError(f"config.json: {key} has several values in {name} and elsewhere")
    return merged


def _one(config: HFConfig, said: dict[str, Any], key: str, default: float) -> float:
    """A number that may be among the rope's parameters, beside them, or both."""
    beside = None if config.get(key) is None else config.real(key, default)
    values = {float(v) for v in (said.pop(key, None), beside) if v is not None}
    if len(values) > 1:
        raise ModelError(f"config.json: {key} has several values: {values}")
    return values.pop() if values else default


def _yarn(said: _Said) -> Yarn:
    factor = said.real("factor", said.positions / said.trained)
    given, over, under = (
        said.optional(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    magnitude = _grown(factor)
    if over and under:
        magnitude = _grown(factor, over) / _grown(factor, under)
    truncate = said.left.pop("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"config.json: rope truncate must be true or false, is {truncate!r}")
    return Yarn(
        factor=factor,
        trained=said.trained,
        beta_fast=said.real("beta_fast", 32.0),
        beta_slow=said.real("beta_slow", 1.0),
        truncate=truncate,
        magnitude=magnitude if given is None else given,
        on_scores=_grown(factor, under) ** 2 if under else 1.0,
    )


def _grown(factor: float, share: float = 1.0) -> float:
    """YaRN's magnitude for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _llama3(said: _Said) -> Llama3:
    low, high = said.real("low_freq_factor"), said.real("high_freq_factor")
    if high <= low:
        raise ModelError(f"config.json: rope high_freq_factor {high} must exceed {low}")
    return Llama3(said.real("factor"), said.trained, low, high)


def _long_rope(said: _Said) -> LongRope:
    factor = said.real("factor", said.positions / said.trained)
    usual = 1.0
    if factor > 1:
        usual = math.sqrt(1 + math.log(factor) / math.log(said.trained))
    both = said.real("attention_factor", usual)
    return LongRope(
        short=said.reals("short_factor"),
        long=said.reals("long_factor"),
        trained=said.trained,
        short_magnitude=said.real("short_mscale") if said.own_magnitudes else both,
        long_magnitude=said.real("long_mscale") if said.own_magnitudes else both,
    )


_KINDS: dict[str, Callable[[_Said], RopeScaling]] = {
    "default": lambda said: Unscaled(),
    "linear": lambda said: Linear(said.real("factor")),
    "dynamic": lambda said: DynamicNTK(said.real("factor"), said.positions),
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _long_rope,
}
