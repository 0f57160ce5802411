"""Least recently used leaves first."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moestro.expert_cache.policies.state import LastUse, read_state, write_state
from moestro.expert_cache.policy import Floats, Ints, Policy


class Lru(Policy):
    """Evicts what has not been used for the longest time; admits everything."""

    name = "lru"

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = (layers, experts)
        self._last = LastUse(layers, experts)

    def touch(
        self, layer: int, experts: Ints, counts: Ints, gates: Floats | None, clock: int
    ) -> None:
        """See `Policy.touch`."""
        self._last.touch(layer, experts)

    def touch_pass(self, keys: Ints, counts: Ints, clock: int) -> None:
        """See `Policy.touch_pass`."""
        self._last.touch_pass(keys)

    def rank(self, keys: Ints, clock: int) -> Ints:
        """See `Policy.rank`."""
        return np.argsort(self._last[keys], kind="stable")

    def save(self, path: Path) -> None:
        """See `Policy.save`."""
        write_state(path, self.name, self._shape, {"last": self._last.state()})

    def load(self, path: Path) -> None:
        """See `Policy.load`."""
        self._last.restore(read_state(path, self.name, self._shape, ["last"])["last"])
