"""Which expert sits in which entry of the host arena, as numbers.

Owns: the map, the leases on entries, and the order in which entries leave. Does not own the
memory (`arena.HostArena` does). No torch. One thread uses it.

Order of leaving: the copy that would be missed least goes first, by the judgement that it was made
with. Without one, an expert that also sits in a slot goes first (its copy here is redundant). Among
equals, the least recently used. A leased entry (being filled or copied from) never leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import chain
from typing import NamedTuple

import numpy as np

from moestro.errors import ConfigError
from moestro.expert_cache.policy import Floats, Ints

# What losing each of these keys would cost, the first `n` of which sit in slots too.
Loss = Callable[[Ints, int], Floats]


class Claim(NamedTuple):
    """A leased entry. `filled` says whether it holds the expert already."""

    entry: int
    filled: bool


class ArenaTable:
    """Bookkeeping of `capacity` entries; as many can be leased at once, so that is its minimum."""

    def __init__(self, capacity: int, loss: Loss | None = None) -> None:
        if capacity < 1:
            raise ConfigError(f"the host arena holds {capacity} experts; it needs at least 1")
        self.capacity = capacity
        self._loss = loss
        self._entry: dict[int, int] = {}  # key -> entry
        self._leases: dict[int, int] = {}  # key -> open leases, at least 1
        self._shadowed: set[int] = set()  # keys that also sit in a slot, here or not
        # Unleased keys, least recently used first. Each key is in exactly one of the two.
        self._redundant: OrderedDict[int, None] = OrderedDict()
        self._needed: OrderedDict[int, None] = OrderedDict()
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, key: int) -> bool:
        return key in self._entry

    def keys(self) -> list[int]:
        """Experts held, in no particular order."""
        return list(self._entry)

    def entry(self, key: int) -> int:
        """Where an expert that is held is."""
        return self._entry[key]

    def entries(self) -> dict[int, int]:
        """Key to entry, of all experts held and filled or being filled."""
        return dict(self._entry)

    @property
    def spare(self) -> bool:
        """Whether an entry can be had without giving up an expert that is in no slot."""
        return bool(self._free or self._redundant)

    @property
    def alone(self) -> int:
        """How many experts are held here, or being filled, and sit in no slot."""
        return len(self._entry.keys() - self._shadowed)

    def lease(self, key: int) -> Claim | None:
        """Lease the entry of `key`, making room when it has none; None when all are leased."""
        entry = self._entry.get(key)
        if entry is not None:
            self._queue(key).pop(key, None)
            self._leases[key] = self._leases.get(key, 0) + 1
            return Claim(entry, True)
        if not self._free and not self._evict():
            return None
        entry = self._free.pop()
        self._entry[key] = entry
        self._leases[key] = 1
        return Claim(entry, False)

    def release(self, key: int, *, filled: bool) -> None:
        """Close one lease. `filled=False`: the entry was never filled, forget it."""
        left = self._leases[key] - 1
        if left:
            self._leases[key] = left
            return
        del self._leases[key]
        if filled:
            self._queue(key)[key] = None
        else:
            self._free.append(self._entry.pop(key))

    def shadow(self, key: int, in_slot: bool) -> None:
        """Tell whether `key` sits in a slot now."""
        before = self._queue(key)
        (self._shadowed.add if in_slot else self._shadowed.discard)(key)
        if key in before:
            del before[key]
            self._queue(key)[key] = None

    def check(self, *, idle: bool = True, filling: Collection[int] = ()) -> None:
        """Raise AssertionError unless map, queues and free list agree.

        `idle`: and exactly the keys in `filling` are leased, once each.
        """
        wrong = f"{len(self._leases)} arena entries are still leased, not {len(filling)}"
        assert not idle or self._leases == dict.fromkeys(filling, 1), wrong
        entries = sorted([*self._entry.values(), *self._free])
        assert entries == list(range(self.capacity)), "entries used + free != capacity"
        queued = [*self._redundant, *self._needed, *self._leases]
        assert sorted(queued) == sorted(self._entry), "a key is neither leased nor in one queue"
        assert self._shadowed.issuperset(self._redundant), "redundant, but in no slot"
        assert self._shadowed.isdisjoint(self._needed), "needed, but in a slot"

    def check_shadows(self, in_slots: set[int]) -> None:
        """Raise AssertionError unless exactly `in_slots` are known to sit in slots."""
        assert self._shadowed == in_slots, "the arena has a wrong idea of what is in slots"

    def _queue(self, key: int) -> OrderedDict[int, None]:
        return self._redundant if key in self._shadowed else self._needed

    def _evict(self) -> bool:
        count = len(self._redundant) + len(self._needed)
        if not count:
            return False
        keys = np.fromiter(chain(self._redundant, self._needed), np.int64, count)
        worst = 0 if self._loss is None else int(self._loss(keys, len(self._redundant)).argmin())
        key = int(keys[worst])
        del self._queue(key)[key]
        self._free.append(self._entry.pop(key))
        return True
