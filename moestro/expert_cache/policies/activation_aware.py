"""Evicts what sequences that looked like the present ones did not use.

After MoE-Infinity (arXiv 2401.14361): each sequence has an activation matrix [layers, experts]
of routed tokens. A bounded collection keeps matrices of finished sequences. For every running
sequence the nearest of them by cosine predicts the experts it will use, and the expert with the
lowest predicted activation x (1 - layer / layers) leaves first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moestro.errors import ConfigError
from moestro.expert_cache.policies.state import read_state, write_state
from moestro.expert_cache.policy import Floats, Ints, Policy

_UNSEEN = 1e-6  # keeps experts that no match has used ordered by layer
_LIVE = 1024  # running sequences remembered; the oldest is forgotten beyond that


class ActivationAware(Policy):
    """`capacity` is the number of finished sequences kept, 4 bytes x layers x experts each.

    One search per pass at most, and only in a pass that has to evict. Running sequences that have
    no past to compare with predict themselves; while none runs, as at the start, all of the past
    predicts.
    """

    name = "activation_aware"
    wants_sequences = True
    records = True

    def __init__(self, layers: int, experts: int, *, capacity: int = 128) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; activation_aware keeps at least 1 sequence")
        self._shape = (layers, experts)
        self._past = np.zeros((capacity, layers * experts), np.float32)  # rows of length 1
        self._kept = 0
        self._running: dict[str, Floats] = {}  # sequence -> [layers * experts] routed tokens
        self._nearness = 1.0 - np.arange(layers) / layers
        self._value = self._predict()
        self._predicted_at = -1

    def touch(
        self, layer: int, experts: Ints, counts: Ints, gates: Floats | None, clock: int
    ) -> None:
        """Uses are learned from `observe`, per sequence."""

    def rank(self, keys: Ints, clock: int) -> Ints:
        """See `Policy.rank`."""
        if clock != self._predicted_at:
            self._value = self._predict()
            self._predicted_at = clock
        return np.argsort(self._value[keys], kind="stable")

    def observe(self, sequences: Sequence[str], layer: int, ids: Ints, row_of: Ints) -> None:
        """See `Policy.observe`."""
        experts = self._shape[1]
        flat = (row_of[:, None] * experts + ids).ravel()
        counts = np.bincount(flat, minlength=len(sequences) * experts).reshape(-1, experts)
        for sequence, row in zip(sequences, counts, strict=True):
            matrix = self._running.get(sequence)
            if matrix is None:
                matrix = self._begin(sequence)
            matrix[layer * experts : (layer + 1) * experts] += row

    def finish(self, sequence: str) -> None:
        """See `Policy.finish`. A full collection gives up the matrix nearest to the new one."""
        matrix = self._running.pop(sequence, None)
        if matrix is None or not matrix.any():
            return
        matrix = matrix / np.linalg.norm(matrix)
        if self._kept < len(self._past):
            place = self._kept
            self._kept += 1
        else:
            place = int((self._past @ matrix).argmax())
        self._past[place] = matrix

    def save(self, path: Path) -> None:
        """See `Policy.save`. Running sequences are not part of it."""
        write_state(path, self.name, self._shape, {"past": self._past[: self._kept]})

    def load(self, path: Path) -> None:
        """See `Policy.load`. Keeps the first `capacity` matrices of the file."""
        past = read_state(path, self.name, self._shape, ["past"])["past"]
        self._kept = min(len(past), len(self._past))
        self._past[: self._kept] = past[: self._kept]
        self._predicted_at = -1

    def _begin(self, sequence: str) -> Floats:
        if len(self._running) >= _LIVE:
            del self._running[next(iter(self._running))]
        matrix = self._running[sequence] = np.zeros(self._past.shape[1], np.float32)
        return matrix

    def _predict(self) -> Floats:
        """Predicted activation x nearness of every expert, [layers * experts]."""
        total = np.zeros(self._shape, np.float64)
        if self._running:
            now = np.stack(list(self._running.values()))
            if self._kept:
                past = self._past[: self._kept]
                total += past[(now @ past.T).argmax(axis=1)].sum(axis=0).reshape(self._shape)
            else:
                total += now.sum(axis=0).reshape(self._shape)
        elif self._kept:
            total += self._past[: self._kept].sum(axis=0).reshape(self._shape)
        total += _UNSEEN
        share = total / total.sum(axis=1, keepdims=True)
        value: Floats = (share * self._nearness[:, None]).ravel()
        return value
