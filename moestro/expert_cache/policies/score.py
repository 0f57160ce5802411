"""A weighted sum of frequency, recency and gate probability; the lowest sum leaves first."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moestro.errors import ConfigError
from moestro.expert_cache.policies.state import DecayedCount, read_state, write_state
from moestro.expert_cache.policy import Bools, Floats, Ints, Policy

_GATE_MEMORY = 0.9  # weight of the past in the running mean of an expert's gate probability


class Score(Policy):
    """alpha * uses a pass + beta / (passes since the last use, from 1) + gamma * gate probability.

    Before weighing, the three terms lie between 0 and 1. `half_life`, of the uses, is in passes.
    Gate probabilities are a running mean over the passes that used the expert; without gates the
    term is 0.
    """

    name = "score"

    def __init__(
        self,
        layers: int,
        experts: int,
        *,
        alpha: float = 8.0,
        beta: float = 1.0,
        gamma: float = 1.0,
        half_life: float = 8.0,
    ) -> None:
        if min(alpha, beta, gamma) < 0:
            raise ConfigError(f"score weights {(alpha, beta, gamma)}: none may be negative")
        self._shape = (layers, experts)
        self._weights = (alpha, beta, gamma)
        self._uses = DecayedCount(layers, experts, half_life)
        self._last = np.full(layers * experts, -(1 << 40), np.int64)  # in passes
        self._gate = np.zeros(layers * experts, np.float64)
        self._last_rows = tuple(self._last.reshape(layers, experts))
        self._gate_rows = tuple(self._gate.reshape(layers, experts))
        self._clock = 0
        self.wants_gates = gamma > 0

    def touch(
        self, layer: int, experts: Ints, counts: Ints, gates: Floats | None, clock: int
    ) -> None:
        """See `Policy.touch`."""
        self._clock = clock
        self._uses.touch(layer, experts, clock)
        self._last_rows[layer][experts] = clock
        if gates is not None:
            row = self._gate_rows[layer]
            row[experts] = _GATE_MEMORY * row[experts] + (1.0 - _GATE_MEMORY) * gates

    def touch_pass(self, keys: Ints, counts: Ints, clock: int) -> None:
        """See `Policy.touch_pass`."""
        self._clock = clock
        self._uses.touch_pass(keys, clock)
        self._last[keys] = clock

    def rank(self, keys: Ints, clock: int) -> Ints:
        """See `Policy.rank`."""
        return np.argsort(self._score(keys, clock), kind="stable")

    def admit(self, key: int, victim: int | None, clock: int) -> bool:
        """See `Policy.admit`."""
        if victim is None:
            return True
        new, old = self._score(np.array([key, victim]), clock)
        return bool(new >= old)

    def admits(self, keys: Ints, victim: int, clock: int) -> Bools:
        """See `Policy.admits`. The use to come counts as a recent one."""
        alpha, beta, gamma = self._weights
        new = alpha * self._uses.rate(keys) + beta + gamma * self._gate[keys]
        deserves: Bools = new >= self._score(np.array([victim]), clock)[0]
        return deserves

    def save(self, path: Path) -> None:
        """See `Policy.save`."""
        last = self._last - self._clock
        arrays = {"uses": self._uses.state(), "last": last, "gate": self._gate}
        write_state(path, self.name, self._shape, arrays)

    def load(self, path: Path) -> None:
        """See `Policy.load`."""
        found = read_state(path, self.name, self._shape, ["uses", "last", "gate"])
        self._uses.restore(found["uses"])
        self._last[:] = found["last"]
        self._gate[:] = found["gate"]

    def _score(self, keys: Ints, clock: int) -> Floats:
        alpha, beta, gamma = self._weights
        recency = beta / (clock - self._last[keys] + 1)
        score: Floats = alpha * self._uses.rate(keys) + recency + gamma * self._gate[keys]
        return score
