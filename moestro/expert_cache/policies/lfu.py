"""Least frequently used leaves first, with counts that fade."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moestro.expert_cache.policies.state import DecayedCount, read_state, write_state
from moestro.expert_cache.policy import Bools, Floats, Ints, Policy


class Lfu(Policy):
    """Evicts the expert with the fewest recent uses; admits what is used at least as often.

    `half_life` is in passes.
    """

    name = "lfu"

    def __init__(self, layers: int, experts: int, *, half_life: float = 64.0) -> None:
        self._shape = (layers, experts)
        self._uses = DecayedCount(layers, experts, half_life)

    def touch(
        self, layer: int, experts: Ints, counts: Ints, gates: Floats | None, clock: int
    ) -> None:
        """See `Policy.touch`."""
        self._uses.touch(layer, experts, clock)

    def touch_pass(self, keys: Ints, counts: Ints, clock: int) -> None:
        """See `Policy.touch_pass`."""
        self._uses.touch_pass(keys, clock)

    def rank(self, keys: Ints, clock: int) -> Ints:
        """See `Policy.rank`."""
        return np.argsort(self._uses[keys], kind="stable")

    def admit(self, key: int, victim: int | None, clock: int) -> bool:
        """See `Policy.admit`."""
        return victim is None or bool(self._uses[key] >= self._uses[victim])

    def admits(self, keys: Ints, victim: int, clock: int) -> Bools:
        """See `Policy.admits`."""
        deserves: Bools = self._uses[keys] + 1.0 >= self._uses[victim]
        return deserves

    def save(self, path: Path) -> None:
        """See `Policy.save`."""
        write_state(path, self.name, self._shape, {"uses": self._uses.state()})

    def load(self, path: Path) -> None:
        """See `Policy.load`."""
        self._uses.restore(read_state(path, self.name, self._shape, ["uses"])["uses"])
