"""A fixed hot set that never leaves; the rest take turns in what is left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from moestro.errors import ConfigError
from moestro.expert_cache.policies.state import LastUse, read_state, write_state
from moestro.expert_cache.policy import Bools, Floats, Ints, Policy


class Pinned(Policy):
    """Hot experts are never displaced by others; the others are least recently used first.

    The hot set is either given (`hot`, keys), or the `size` experts most used in the run whose
    state is loaded. With neither, nothing is hot and this is LRU.
    """

    name = "pinned"

    def __init__(
        self, layers: int, experts: int, *, hot: Iterable[int] = (), size: int = 0
    ) -> None:
        self._shape = (layers, experts)
        self._size = size
        self._last = LastUse(layers, experts)
        self._uses = np.zeros(layers * experts, np.int64)
        self._rows = tuple(self._uses.reshape(layers, experts))
        self._hot = np.zeros(layers * experts, np.bool_)
        keys = np.fromiter(hot, np.int64)
        if len(keys) and not 0 <= keys.min() <= keys.max() < layers * experts:
            raise ConfigError(f"hot expert keys must lie in 0..{layers * experts - 1}")
        if len(keys) and size:
            raise ConfigError("the pinned policy takes `hot` or `size`, not both")
        self._hot[keys] = True

    def touch(
        self, layer: int, experts: Ints, counts: Ints, gates: Floats | None, clock: int
    ) -> None:
        """See `Policy.touch`."""
        self._last.touch(layer, experts)
        self._rows[layer][experts] += 1

    def touch_pass(self, keys: Ints, counts: Ints, clock: int) -> None:
        """See `Policy.touch_pass`."""
        self._last.touch_pass(keys)
        self._uses[keys] += 1

    def rank(self, keys: Ints, clock: int) -> Ints:
        """See `Policy.rank`."""
        return np.lexsort((self._last[keys], self._hot[keys]))

    def admit(self, key: int, victim: int | None, clock: int) -> bool:
        """See `Policy.admit`."""
        return victim is None or not self._hot[victim] or bool(self._hot[key])

    def admits(self, keys: Ints, victim: int, clock: int) -> Bools:
        """See `Policy.admits`."""
        hot: Bools = self._hot[keys]
        return hot if self._hot[victim] else np.ones(len(keys), np.bool_)

    def save(self, path: Path) -> None:
        """See `Policy.save`."""
        arrays = {"last": self._last.state(), "uses": self._uses}
        write_state(path, self.name, self._shape, arrays)

    def load(self, path: Path) -> None:
        """See `Policy.load`."""
        found = read_state(path, self.name, self._shape, ["last", "uses"])
        self._last.restore(found["last"])
        self._uses[:] = found["uses"]
        if self._size:
            self._hot[:] = False
            self._hot[np.argsort(-self._uses, kind="stable")[: self._size]] = True
