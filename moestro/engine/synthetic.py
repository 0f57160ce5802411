"""What a benchmark makes up on random weights: the routing of decode steps, and the tokens.

Owns: the laws of synthetic routing and the scrambling of token ids. No torch. Does not own: where
a step takes its routing from (`decoder`) or who asks for it (`bench`).

A random model's own routing has the locality that chance gave it, and greedy text of a random
model runs in circles, which looks like a perfect cache. So locality becomes a stated input, and
a chosen token is replaced by one that depends on it but does not come back.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moestro.errors import ConfigError
from moestro.expert_cache.trace import NO_SEQUENCE, read_trace

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.floating]

FROZEN = "frozen-"  # a row whose id starts so repeats its first experts: steps without misses
SPECIAL = 3  # ids below this are never made by scrambling
ROUNDS = 64  # of drawing again what was drawn twice, before ranking all experts


@dataclass(frozen=True, slots=True)
class Synthetic:
    """What is made up. `keep`: how likely a row keeps each expert of its last step."""

    scramble: bool = False
    routing: str | None = None  # uniform, zipf:A or replay:FILE; None: the router's own
    keep: float = 0.0
    seed: int = 0

    def source(self, layers: int, experts: int, top_k: int) -> RoutingSource | None:
        """The routing of a model of this shape; None when the router decides. ConfigError."""
        if self.routing is None:
            return None
        return RoutingSource(self.routing, layers, experts, top_k, self.keep, self.seed)


def row_number(id: str) -> int:
    """A number below 2^16 for a sequence, the same wherever it runs."""
    return zlib.crc32(id.encode()) & 0xFFFF


def scrambled(token: int, step: int, row: int, vocab: int) -> int:
    """The id that stands for `token`, output number `step` of the sequence numbered `row`.

    It is at least 3. All products fit in 64 bits, so a kernel may compute the same.
    """
    return (token * 7919 + step * 104729 + row * 15485863) % (vocab - SPECIAL) + SPECIAL


def parse_routing(text: str) -> float | Path:
    """The exponent of a Zipf law (0: uniform), or the trace to replay. ConfigError."""
    kind, colon, rest = text.partition(":")
    if text == "uniform":
        return 0.0
    if kind == "replay" and rest:
        return Path(rest)
    if kind == "zipf" and colon:
        try:
            exponent = float(rest)
        except ValueError:
            exponent = -1.0
        if 0 <= exponent <= 16:
            return exponent
        raise _refused(f"the exponent of zipf is a number from 0 to 16, not {rest!r}")
    raise _refused(f"{text!r} is none of uniform, zipf:A and replay:TRACE")


class RoutingSource:
    """Draws or replays the experts of decode steps."""

    def __init__(
        self, spec_text: str, layers: int, experts: int, top_k: int, keep: float, seed: int
    ) -> None:
        if not 0 <= keep <= 1:
            raise _refused(f"--keep is {keep}; it must be from 0 to 1")
        law = parse_routing(spec_text)
        self._rows: Draws | Tape
        if isinstance(law, Path):
            if keep:
                raise _refused("--keep goes with uniform and zipf: a trace has its own locality")
            self._rows = Tape(law, layers, experts, top_k)
        else:
            self._rows = Draws(law, layers, experts, top_k, keep, seed)

    def step(self, ids: Sequence[str]) -> Ids:
        """Experts of the next step of these sequences: [layers, rows, top_k], distinct in a row."""
        return self._rows.step(ids)

    @property
    def law(self) -> Floats | None:
        """log p of each expert, [layers, experts], for prompts; None where a trace is replayed:
        then prompts are routed by the routers."""
        return self._rows.law() if isinstance(self._rows, Draws) else None


class Alias:
    """Draws from fixed weights in two look-ups each (the alias method, Vose 1991)."""

    def __init__(self, weights: Floats) -> None:
        self._share = weights * len(weights) / weights.sum()
        self._other = np.arange(len(weights), dtype=np.int32)
        small = [i for i, share in enumerate(self._share.tolist()) if share < 1]
        large = [i for i, share in enumerate(self._share.tolist()) if share >= 1]
        while small and large:
            low, high = small.pop(), large[-1]
            self._other[low] = high
            self._share[high] -= 1 - self._share[low]
            if self._share[high] < 1:
                small.append(large.pop())
        self._share[small + large] = 1.0

    def draw(self, random: np.random.Generator, count: int) -> Ids:
        """`count` independent indexes of weights."""
        number = random.random(count)
        number *= len(self._share)
        place = number.astype(np.int32)
        number -= place
        return np.where(number < self._share.take(place), place, self._other.take(place))


class Draws:
    """Zipf's law over a random order of each layer's experts; remembers the last step's rows."""

    def __init__(
        self, exponent: float, layers: int, experts: int, top_k: int, keep: float, seed: int
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._keep = keep
        self._layers, self._experts, self._top_k = layers, experts, top_k
        order = [self._random.permutation(experts) for _ in range(layers)]
        self._expert = np.stack(order).astype(np.int32)  # [layers, rank]
        weights = np.arange(1, experts + 1) ** -exponent
        self._log = np.log(weights)
        self._alias = Alias(weights)
        self._known: dict[str, int] = {}  # sequence -> row of the last step
        self._last = np.empty((layers, 0, top_k), np.int32)
        self._claim = np.empty(0, np.int32)  # kept: fresh memory costs as much as drawing

    def law(self) -> Floats:
        """As `RoutingSource.law`."""
        made = np.empty(self._expert.shape)
        np.put_along_axis(made, self._expert, np.broadcast_to(self._log, made.shape), 1)
        return made

    def step(self, ids: Sequence[str]) -> Ids:
        """As `RoutingSource.step`."""
        table = np.full((self._layers, len(ids), self._top_k), -1, np.int32)
        rows = [row for row, id in enumerate(ids) if id in self._known]
        keep = [1.0 if id.startswith(FROZEN) else self._keep for id in (ids[row] for row in rows)]
        if any(keep):
            old = self._last[:, [self._known[ids[row]] for row in rows]]
            kept = self._random.random(old.shape, np.float32) < np.array(keep)[None, :, None]
            table[:, rows] = np.where(kept, old, -1)
        self._fill(table.reshape(-1, self._top_k), len(ids))
        self._known, self._last = {id: row for row, id in enumerate(ids)}, table
        return table

    def _fill(self, table: Ids, rows: int) -> None:
        """Draw where `table` [layers * rows, k] is -1, without repeats in a row: what is drawn
        again is rejected, so that it is drawing without replacement."""
        flat, names = table.reshape(-1), self._expert.reshape(-1)
        taken = np.zeros(len(table) * self._experts, np.bool_)  # [line, expert]
        if len(self._claim) < len(taken):
            self._claim = np.zeros(len(taken), np.int32)
        claim = self._claim
        left = np.flatnonzero(flat < 0).astype(np.int32)
        if len(left) < len(flat):
            lines = np.arange(len(table), dtype=np.int32)[:, None] * self._experts
            taken[(lines + table)[table >= 0]] = True
        for _ in range(ROUNDS):
            if not len(left):
                return
            line = left // self._top_k
            rank = self._alias.draw(self._random, len(left))
            expert = names.take(line // rows * self._experts + rank)
            place, turn = line * self._experts + expert, np.arange(len(left), dtype=np.int32)
            claim[place] = turn  # of two that drew the same, either may have it
            good = (claim.take(place) == turn) & ~taken.take(place)
            taken[place] = True
            flat[left[good]] = expert[good]
            left = left[~good]
        rest = np.unique(left // self._top_k)
        table[rest] = self._ranked(table[rest], rest // rows)

    def _ranked(self, part: Ids, layer: Ids) -> Ids:
        """The same for rows where little is left to draw: the greatest log p + Gumbel noise."""
        names = self._expert[layer]  # [N, E]
        worth = self._log + self._random.gumbel(size=names.shape)
        worth[(names[:, :, None] == part[:, None, :]).any(-1)] = -np.inf
        best = np.take_along_axis(names, np.argsort(-worth, 1)[:, : part.shape[1]], 1)
        drawn = part < 0
        turn = np.maximum(np.cumsum(drawn, 1) - 1, 0)
        return np.where(drawn, np.take_along_axis(best, turn, 1), part).astype(np.int32)


class Tape:
    """Decode steps of a recorded trace, one sequence after the other, as an endless tape."""

    def __init__(self, path: Path, layers: int, experts: int, top_k: int) -> None:
        trace = read_trace(path)
        found = trace.header.layers, trace.header.experts, trace.header.top_k
        if found != (layers, experts, top_k):
            raise _refused(
                f"{path} has {found[0]} layers of {found[1]} experts, top {found[2]}; "
                f"the model has {layers} of {experts}, top {top_k}"
            )
        sequences: dict[int, list[Ids]] = {}
        for step in trace:
            if step.kind != "decode" or [r.layer for r in step.routes] != list(range(layers)):
                continue  # a process that died leaves a step unfinished
            experts_of = np.stack([route.ids for route in step.routes]).astype(np.int32)
            for row, sequence in enumerate(step.routes[0].sequences.tolist()):
                owner = -2 - row if sequence == NO_SEQUENCE else sequence
                sequences.setdefault(owner, []).append(experts_of[:, row])
        if not sequences:
            raise _refused(f"{path} has no decode steps to replay")
        lengths = [len(steps) for steps in sequences.values()]
        self._tape = np.stack([one for steps in sequences.values() for one in steps])
        self._starts = [0, *np.cumsum(lengths[:-1]).tolist()]
        self._arrived = 0
        self._at: dict[str, int] = {}  # sequence -> step of the tape it had last

    def step(self, ids: Sequence[str]) -> Ids:
        """As `RoutingSource.step`. A newcomer starts where the next recorded sequence does."""
        self._at = {id: self._next(id) for id in ids}
        picked: Ids = self._tape[list(self._at.values())].swapaxes(0, 1)
        return np.ascontiguousarray(picked)

    def _next(self, id: str) -> int:
        if id in self._at:
            return (self._at[id] + (not id.startswith(FROZEN))) % len(self._tape)
        self._arrived += 1
        start: int = self._starts[(self._arrived - 1) % len(self._starts)]
        return start


def _refused(message: str) -> ConfigError:
    return ConfigError(message, param="routing")
