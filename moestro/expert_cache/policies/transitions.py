"""Which experts follow which: a linear model that learns from the sequences that run.

Owns: the matrix, and the few passes that it still has to learn from. No torch.

What a sequence used in one pass says much about what it uses in the next ones: it depends on the
token that was read there, and on the text. The model expects of a sequence the mean use of every
expert plus the sum of the matrix rows of the experts it used; rows follow the errors (normalised
least mean squares, Widrow and Hoff 1960), fast while they are new. A matrix of all experts against
all would be too large, so few layers are sources, and where one has too many experts for the
matrix, they share rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moestro.expert_cache.policy import Floats, Ints

ROWS = 192  # of the matrix, at most
CELLS = 3 << 18  # of the matrix, at most: reading them is most of what a pass costs
UPDATES = 1 << 14  # cells changed a pass, about: of a large matrix only every few passes
SAMPLES = 8  # sequences learned from in one pass, at most
_FIRST, _LEAST = 0.5, 0.125  # rate of learning of a new row, and of an old one
_SETTLE = 4  # uses after which a row is learned half as fast
_MEAN = 1 / 256  # weight of the newest sequences in the mean use, once there were as many


class _Pass(NamedTuple):
    row_of: dict[str, int]
    keys: Ints  # [rows, layers * top_k]


class Transitions:
    """Learns by `learn`, once a pass, and says what to `expect`."""

    def __init__(self, layers: int, experts: int) -> None:
        keys = layers * experts
        rows = max(1, min(ROWS, CELLS // keys, keys))
        sources = max(1, rows // experts)
        row_of = np.full((layers, experts), -1, np.int64)
        for place, layer in enumerate(np.linspace(layers - 1, 0, sources).astype(int).tolist()):
            row_of[layer] = (place * experts + np.arange(experts)) % rows
        self._row_of = row_of.ravel()
        self._sources = np.flatnonzero(self._row_of >= 0)
        self._offsets = np.arange(layers)[:, None, None] * experts
        self._matrix = np.zeros((rows, keys), np.float32)
        self._seen = np.zeros(rows, np.float32)  # passes that a row was learned from
        self._mean = np.zeros(keys, np.float32)
        self._learned = 0
        self._turn = 0  # the next to learn from
        self._idle = 0  # passes until then
        self._passes: deque[_Pass] = deque()

    def forget(self) -> None:
        """What comes next does not follow on what was."""
        self._passes.clear()
        self._idle = 0

    def learn(self, sequences: Sequence[str], ids: Sequence[Ints | None], worth: Floats) -> None:
        """The last pass routed `ids`, for each layer [sequences, top_k]; without one of them,
        nothing is learned. `worth` [h]: of a use 1 .. h passes later."""
        parts = [part for part in ids if part is not None and len(part) == len(sequences)]
        if len(parts) < len(ids) or not sequences or len({part.shape for part in parts}) > 1:
            self.forget()
            return
        keys = (np.stack(parts) + self._offsets).swapaxes(0, 1).reshape(len(sequences), -1)
        self._passes.append(_Pass({name: row for row, name in enumerate(sequences)}, keys))
        if len(self._passes) <= len(worth):
            return
        first = self._passes.popleft()
        names = [name for name in first.row_of if name in self._passes[-1].row_of]
        if self._idle:
            self._idle -= 1
        elif names:
            self._update(first, self._choose(names, keys.shape[1]), worth)

    def expect(self, used: Floats) -> Floats:
        """Uses to come, by the tokens of each expert in the last pass [layers * experts]."""
        sources = self._sources[used[self._sources] > 0]
        rows, seen = self._row_of[sources], used[sources]
        # Not `@`: what a BLAS gains by threads is lost in waiting for them on a busy machine.
        if len(rows) < len(self._matrix) // 2:
            expected: Floats = np.einsum("r,rk->k", seen, self._matrix[rows])
            return expected
        every = np.bincount(rows, seen, len(self._matrix)).astype(np.float32)
        expected = np.einsum("r,rk->k", every, self._matrix)
        return expected

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """To be saved."""
        counts = np.array([self._learned, self._turn])
        return {
            "transitions": self._matrix,
            "seen": self._seen,
            "mean": self._mean,
            "counts": counts,
        }

    def restore(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from `state`."""
        self._matrix[:], self._seen[:] = saved["transitions"], saved["seen"]
        self._mean[:] = saved["mean"]
        self._learned, self._turn = saved["counts"].tolist()
        self.forget()

    def _choose(self, names: list[str], routes: int) -> list[str]:
        """Whom to learn from now: as many as the bounds allow, in turn."""
        cells = routes * len(self._sources) // len(self._row_of) * len(self._mean)
        count = max(1, min(SAMPLES, UPDATES // max(1, cells), len(names)))
        every = -(-cells // UPDATES)
        self._idle = every - 1 + self._learned % 2 if every > 1 else 0  # no fixed rhythm
        start, self._turn = self._turn % len(names), (self._turn + count) % (1 << 30)
        return (names + names)[start : start + count]

    def _update(self, first: _Pass, names: list[str], worth: Floats) -> None:
        lines = np.arange(len(names))
        came = np.zeros((len(names), len(self._mean)), np.float32)
        for value, later in zip(worth.tolist(), self._passes, strict=True):
            for line, name in enumerate(names):
                row = later.row_of.get(name)
                if value and row is not None:
                    came[line, later.keys[row]] += value
        rows = self._row_of[first.keys[[first.row_of[name] for name in names]]]
        used = np.zeros((len(names), len(self._matrix)), np.float32)
        np.add.at(used, (lines.repeat(rows.shape[1]), rows.ravel()), rows.ravel() >= 0)
        self._learned += 1
        self._mean += max(_MEAN, 1 / self._learned) * (came.mean(0) - self._mean)
        touched = np.flatnonzero(used.any(0))
        used = used[:, touched]
        matrix = self._matrix[touched]
        error = came - self._mean - used @ matrix
        self._seen[touched] += 1
        rate = np.maximum(_FIRST * _SETTLE / (self._seen[touched] + _SETTLE), _LEAST)
        share = rate / used.sum(0)  # the mean of the sequences that used a row
        step = np.einsum("sr,sk->rk", used / used.sum(1, keepdims=True), error)
        self._matrix[touched] = matrix + share[:, None] * step
