"""Learns, while it serves, which experts follow which, and keeps those about to be used.

Owns: a forecast of every expert's uses in the next passes, from what the running sequences used in
their last one (`Transitions`) and from how often it was used of late; and the fit of these two.
Does not own: who is in a slot. docs/policies.md has what it wins, and what was tried and lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moestro.expert_cache.policies.state import read_state, write_state
from moestro.expert_cache.policies.transitions import Transitions
from moestro.expert_cache.policy import Bools, Floats, Ints, Policy

_SOON, _LATER = 0, 1  # the two forecasts: of the pass in which slots are given away, and after it
_WORTH = (1.0, 0.5, 0.25)  # of a use in the passes after it
_HALF_LIVES = (1.0, 4.0, 16.0, 128.0)  # passes; of the counts of past uses
_COUNTS = len(_HALF_LIVES)
_FEATURES = _COUNTS + 1  # the counts, and what the transitions say of later
_FIRST = ((0.25, 0.25),) * _COUNTS + ((0.0, 1.0),)  # weights until the fit has better
_MEMORY = 0.995  # weight of the past in the fit, a pass
_RIDGE = 1e-6
_PART = 2048  # experts that one pass fits: the weights are the same for all
_MARGIN = 1e-3  # uses that a newcomer must be ahead by: equals do not exchange places
_HALVINGS = 10  # in the search for a GPU's bar
_EXCHANGE = 1 / 16  # of the slots a GPU may exchange in a pass: what it knows of them is old


class Predictive(Policy):
    """The expert with the lowest forecast leaves first; a newcomer needs a higher one.

    A forecast is a weighted sum of five features of an expert: its uses so far, faded with four
    half-lives, and what `Transitions` expects. The weights are a least-squares fit
    to what then came, the past fading, so what is useless for a model or its traffic gets no
    weight. All is linear in the sequences: one sum serves any number of them.

    A use soon is worth something only in a layer that the pass has still to come to. A GPU
    (`touch_pass`) takes slots by lists that were made two passes after the last known one, so its
    forecasts begin one pass later; where in the pass a slot will be taken is not known, and only
    later uses count.
    """

    name = "predictive"
    wants_sequences = True
    steady = True

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = (layers, experts)
        keys = layers * experts
        fade = 0.5 ** (1.0 / np.array(_HALF_LIVES, np.float32))
        self._fade, self._share = fade[:, None], 1.0 - fade[:, None]
        self._features = np.zeros((_FEATURES, keys), np.float32)
        self._forecasts = np.zeros((2, keys), np.float32)
        self._normal, self._moment = np.eye(_FEATURES), np.array(_FIRST)
        self._surprise = np.array([1.0, 0.1])  # faded: of soon, squared; and times that of later
        self._transitions = Transitions(layers, experts)
        self._past: deque[tuple[Floats, Floats]] = deque()  # features, and the uses since before
        self._clock = 0
        self._layer = layers  # the last one of this pass so far
        self._value: Floats | None = None  # of each expert, when known
        self._late = False  # a GPU's lists are one pass older
        self._bar = 0.0  # what a newcomer to a GPU must be worth
        self._next = 0  # key at which the next fit begins
        self._open = False  # the present pass has uses
        self._used = np.zeros(keys, np.float32)  # tokens of each expert in it
        self._rows = self._used.reshape(layers, experts)
        self._names: list[str] = []  # of the rows of the last decode pass
        self._ids: list[Ints | None] = [None] * layers  # [rows, top_k] of its layers so far
        self._hint: tuple[list[str], Ints] | None = None  # names and ids of the layer to come
        self._weight = 1.0  # of a token there
        self._forecast()

    def observe(self, sequences: Sequence[str], layer: int, ids: Ints, row_of: Ints) -> None:
        """See `Policy.observe`. A prompt counts as one token of its sequence."""
        self._weight = len(sequences) / max(1, len(ids))
        if len(ids) == len(sequences):
            self._hint = list(sequences), ids

    def observe_pass(self, sequences: Sequence[str], ids: Ints) -> None:
        """See `Policy.observe_pass`."""
        self._names, self._ids = list(sequences), list(ids)

    def touch(
        self, layer: int, experts: Ints, counts: Ints, gates: Floats | None, clock: int
    ) -> None:
        """See `Policy.touch`."""
        if clock != self._clock:
            self._end()
            self._clock, self._late = clock, False
        if self._hint is not None:
            self._names, self._ids[layer] = self._hint
        self._rows[layer][experts] += counts * self._weight
        self._hint, self._weight, self._layer, self._open = None, 1.0, layer, True
        self._value = None

    def touch_pass(self, keys: Ints, counts: Ints, clock: int) -> None:
        """See `Policy.touch_pass`."""
        self._used[keys] += counts
        self._clock, self._late, self._open = clock, True, True
        self._end()

    def rank(self, keys: Ints, clock: int) -> Ints:
        """See `Policy.rank`."""
        worth = self._worth()[keys]
        order = np.argsort(worth, kind="stable")
        if self._late:
            self._bar = self._find_bar(keys, worth[order])
        return order

    def admit(self, key: int, victim: int | None, clock: int) -> bool:
        """See `Policy.admit`."""
        if victim is None:
            return True
        worth = self._worth()
        return bool(worth[key] > worth[victim] + _MARGIN)

    def admits(self, keys: Ints, victim: int, clock: int) -> Bools:
        """See `Policy.admits`. The last `rank` of what is in slots has set the bar."""
        worthy: Bools = self._if_used()[keys] > self._bar
        return worthy

    def finish(self, sequence: str) -> None:
        """See `Policy.finish`. When nobody is left, what comes next follows on nothing."""
        self._end()
        if sequence in self._names:
            self._names.remove(sequence)
        if not self._names:
            self._past.clear()
            self._transitions.forget()

    def save(self, path: Path) -> None:
        """See `Policy.save`."""
        self._end()
        arrays = self._transitions.state() | {
            "features": self._features,
            "normal": self._normal,
            "moment": self._moment,
            "surprise": self._surprise,
        }
        write_state(path, self.name, self._shape, arrays)

    def load(self, path: Path) -> None:
        """See `Policy.load`."""
        names = ["features", "normal", "moment", "surprise", *self._transitions.state()]
        found = read_state(path, self.name, self._shape, names)
        self._features[:] = found["features"]
        self._normal[:], self._moment[:] = found["normal"], found["moment"]
        self._surprise[:] = found["surprise"]
        self._transitions.restore(found)
        self._past.clear()
        self._forecast()

    def _worth(self) -> Floats:
        """Of keeping each expert: where the pass has been, what came there is known by now."""
        if self._value is None:
            soon, later = self._forecasts
            self._value = later
            if not self._late:
                came = (self._layer + 1) * self._shape[1]
                self._value = later + soon
                known = self._gain * (self._used[:came] - soon[:came])
                self._value[:came] = later[:came] + known
        return self._value

    def _if_used(self) -> Floats:
        """What all experts would be worth, used by one token of the pass to come."""
        soon, later = self._forecasts
        worth: Floats = later + self._gain * np.maximum(0.0, 1.0 - soon)
        return worth

    def _find_bar(self, held: Ints, worth: Floats) -> float:
        """What a newcomer must be worth, when those in slots are worth `worth`, ascending: so much
        that no more are expected to come than there are slots worth less, and bounded."""
        if not len(worth):
            return 0.0
        later, chance = self._if_used(), self._forecasts[_SOON].clip(0.0, 1.0)
        chance[held] = 0.0
        most = len(worth) * _EXCHANGE
        low, high = float(worth[0]), float(later.max())
        come = 0.0  # of those above `high`
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = later > middle
            total = come + float(chance[above].sum())
            if total > min(most, float(np.searchsorted(worth, middle - _MARGIN))):
                low, left = middle, above
            else:
                high, come, left = middle, total, ~above
            later, chance = later[left], chance[left]
        return high

    def _end(self) -> None:
        """The present pass is over: learn from it, and forecast the next ones.

        Of prompts only the counts are of use; nothing fades by them.
        """
        if not self._open:
            return
        used = self._used.copy()
        decoded = all(ids is not None for ids in self._ids)
        if decoded:
            none = (0.0,) * self._late
            target = np.zeros((2, len(none) + 1 + len(_WORTH)), np.float32)
            target[_SOON, len(none)], target[_LATER, len(none) + 1 :] = 1.0, _WORTH
            self._transitions.learn(self._names, self._ids, target[_LATER])
            self._fit(used, target)
            self._features[:_COUNTS] *= self._fade
            self._features[_COUNTS] = self._transitions.expect(used)
        self._features[:_COUNTS] += used * self._share
        if decoded:
            self._past.append((self._features.copy(), used))
        self._forecast()
        self._open = False
        self._layer = self._shape[0]
        self._ids = [None] * self._shape[0]
        self._used[:] = 0.0

    def _fit(self, used: Floats, target: Floats) -> None:
        """Learn how the features of some passes ago would have told the uses since."""
        passes = target.shape[1]
        while len(self._past) > passes:
            self._past.popleft()
        if len(self._past) < passes:
            return
        part = slice(self._next, self._next + _PART)
        self._next = part.stop if part.stop < len(used) else 0
        features = self._past.popleft()[0][:, part]
        used = used[part]
        came = target @ np.stack([*(uses[part] for _, uses in self._past), used])
        scale = 1.0 / max(1.0, float(used.sum()))
        soon, later = came - self._weights @ features
        self._surprise *= _MEMORY
        self._surprise += float(soon @ soon) * scale, float(soon @ later) * scale
        self._normal *= _MEMORY
        self._normal += features @ features.T * scale
        self._moment *= _MEMORY
        self._moment += features @ came.T * scale

    def _forecast(self) -> None:
        ridge = _RIDGE * np.eye(_FEATURES)
        weights = np.linalg.solve(self._normal + ridge, self._moment)
        self._weights = weights.T.astype(np.float32)
        self._gain = float(self._surprise[1] / self._surprise[0])
        self._forecasts = self._weights @ self._features
        self._value = None
