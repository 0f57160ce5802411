"""LRU order, with admission by frequency: one pass over many experts cannot flush the slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moestro.expert_cache.policies.state import DecayedCount, LastUse, read_state, write_state
from moestro.expert_cache.policy import Bools, Floats, Ints, Policy

_ONE_USE = 1.0 + 1e-6  # the last use of the newcomer, and rounding


class LruFrequency(Policy):
    """Evicts the least recently used, but only for an expert that is used more often.

    The use that causes the fetch does not count for the newcomer, so in a cyclic scan, where all
    are equal, nothing is exchanged. `half_life` is in passes. After TinyLFU (Einziger, Friedman,
    Manes 2017), with exact faded counts in place of a sketch.
    """

    name = "lru_frequency"

    def __init__(self, layers: int, experts: int, *, half_life: float = 16.0) -> None:
        self._shape = (layers, experts)
        self._last = LastUse(layers, experts)
        self._uses = DecayedCount(layers, experts, half_life)

    def touch(
        self, layer: int, experts: Ints, counts: Ints, gates: Floats | None, clock: int
    ) -> None:
        """See `Policy.touch`."""
        self._last.touch(layer, experts)
        self._uses.touch(layer, experts, clock)

    def touch_pass(self, keys: Ints, counts: Ints, clock: int) -> None:
        """See `Policy.touch_pass`."""
        self._last.touch_pass(keys)
        self._uses.touch_pass(keys, clock)

    def rank(self, keys: Ints, clock: int) -> Ints:
        """See `Policy.rank`."""
        return np.argsort(self._last[keys], kind="stable")

    def admit(self, key: int, victim: int | None, clock: int) -> bool:
        """See `Policy.admit`."""
        return victim is None or bool(self._uses[key] > self._uses[victim] + _ONE_USE)

    def admits(self, keys: Ints, victim: int, clock: int) -> Bools:
        """See `Policy.admits`. The use to come does not count."""
        deserves: Bools = self._uses[keys] > self._uses[victim] + (_ONE_USE - 1.0)
        return deserves

    def save(self, path: Path) -> None:
        """See `Policy.save`."""
        arrays = {"last": self._last.state(), "uses": self._uses.state()}
        write_state(path, self.name, self._shape, arrays)

    def load(self, path: Path) -> None:
        """See `Policy.load`."""
        found = read_state(path, self.name, self._shape, ["last", "uses"])
        self._last.restore(found["last"])
        self._uses.restore(found["uses"])
