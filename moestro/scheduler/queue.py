"""Sequences in the order in which they have a claim: lower priority value, then arrival.

Owns: that order. A sequence that gave way comes back to its old place, since both are kept. Does
not own: who is admitted (`scheduler.filling`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import attrgetter

from moestro.scheduler.sequence import Sequence

claim = attrgetter("order")

# Long prompts that may turn out small because their prefix is cached: so many are looked at in
# each turn for the small sweep, since thousands may wait.
LOOKAHEAD = 32


class Line:
    """A sorted line of sequences, the one with the first claim in front."""

    def __init__(self) -> None:
        self._members: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def add(self, seq: Sequence) -> None:
        """Put `seq` in its place."""
        insort(self._members, seq, key=claim)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out; it must be there."""
        place = bisect_left(self._members, seq.order, key=claim)
        assert self._members[place] is seq, seq.id
        del self._members[place]

    def last(self) -> Sequence:
        """The one with the weakest claim."""
        return self._members[-1]

    def check(self) -> None:
        """Raise AssertionError unless it is sorted and nobody stands in it twice."""
        orders = [seq.order for seq in self._members]
        assert orders == sorted(set(orders)), orders


class Waiting:
    """Those who wait, long prompts apart from short ones, which are at most `small` tokens."""

    def __init__(self, small: int) -> None:
        self._small = small
        self._short = Line()
        self._long = Line()

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[Sequence]:
        return merge(self._short, self._long, key=claim)

    def overtakers(self) -> Iterator[Sequence]:
        """Those for a small sweep: the short, and the first of the long, in the order of claim."""
        return merge(self._short, islice(self._long, LOOKAHEAD), key=claim)

    def add(self, seq: Sequence) -> None:
        """Put `seq` in its place."""
        self._line(seq).add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out; it must be there."""
        self._line(seq).remove(seq)

    def check(self) -> None:
        """Raise AssertionError unless both lines are in order."""
        self._short.check()
        self._long.check()

    def _line(self, seq: Sequence) -> Line:
        return self._short if len(seq.tokens) <= self._small else self._long
