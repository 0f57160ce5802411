"""Which expert sits in which slot, as numbers.

Owns: the two-way map between experts and slots, the free list, the staging ring, pin counts.
Does not own: memory (`slots`), or the choice of what leaves (`residency`). No torch.

A key is `layer * experts + expert`. The first slots are the cache, the last `staging` of them
are the ring for experts that are used once and not kept. A slot moves through these states:

    cache    FREE --reserve--> RESERVED --bind--> owned --evict--> RESERVED
               ^------ release ----'
    staging  FREE --take_stage--> RESERVED --give_stage--> FREE        (never owned)
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from moestro.errors import ConfigError

Ints = npt.NDArray[np.integer[Any]]

FREE = -1
RESERVED = -2  # being filled, or a staging slot in use


class SlotTable:
    """Slots of the device slab. One thread uses it."""

    def __init__(self, layers: int, experts: int, slots: int, staging: int) -> None:
        if not 0 <= staging <= slots:
            raise ConfigError(f"{staging} staging slots do not fit in {slots} expert slots")
        self.cache_slots = slots - staging
        self.slot_of = np.full(layers * experts, FREE, np.int32)
        self.owner = np.full(slots, FREE, np.int32)
        self.pins = np.zeros(slots, np.int32)
        self.rows = tuple(self.slot_of.reshape(layers, experts))  # one view per layer
        self._free = list(range(self.cache_slots - 1, -1, -1))
        self._ring = deque(range(self.cache_slots, slots))

    @property
    def free(self) -> int:
        """Cache slots that hold nothing."""
        return len(self._free)

    def reserve(self) -> int | None:
        """Take a free cache slot to fill, or None when there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.owner[slot] = RESERVED
        return slot

    def evict(self, slot: int) -> int:
        """Take an owned, unpinned cache slot to fill; returns the key that leaves."""
        key = int(self.owner[slot])
        assert key >= 0, f"slot {slot} holds nothing to evict"
        assert self.pins[slot] == 0, f"slot {slot} is pinned"
        self.slot_of[key] = FREE
        self.owner[slot] = RESERVED
        return key

    def bind(self, slot: int, key: int) -> None:
        """A reserved slot now holds `key`."""
        assert self.owner[slot] == RESERVED, f"slot {slot} was not reserved"
        assert slot < self.cache_slots, f"slot {slot} is for staging"
        assert self.slot_of[key] == FREE, f"expert {key} is already in slot {self.slot_of[key]}"
        self.owner[slot] = key
        self.slot_of[key] = slot

    def replace(self, keys: Ints, slots: Ints) -> Ints:
        """One after another, `slots`, free or owned, came to hold the distinct `keys`; returns the
        keys that left. A key may leave one slot and come into another, and a slot come twice."""
        before = self.owner[slots]
        free = slots[before == FREE]
        if len(free):
            taken = set(free.tolist())
            self._free = [slot for slot in self._free if slot not in taken]
        self.slot_of[before[before >= 0]] = FREE
        self.slot_of[keys] = slots
        self.owner[slots] = keys  # of several, the last one stays
        overwritten = keys[self.owner[slots] != keys]
        self.slot_of[overwritten] = FREE
        touched = np.concatenate((before[before >= 0], overwritten))
        return np.unique(touched[self.slot_of[touched] < 0])

    def release(self, slot: int) -> None:
        """A reserved cache slot was not filled after all."""
        assert self.owner[slot] == RESERVED, f"slot {slot} was not reserved"
        assert slot < self.cache_slots, f"slot {slot} is for staging"
        self.owner[slot] = FREE
        self._free.append(slot)

    def take_stage(self) -> int | None:
        """The next staging slot of the ring, or None when all are in use."""
        if not self._ring:
            return None
        slot = self._ring.popleft()
        self.owner[slot] = RESERVED
        return slot

    def give_stage(self, slot: int) -> None:
        """A staging slot's expert has been used; the slot may be overwritten."""
        assert slot >= self.cache_slots, f"slot {slot} is not for staging"
        assert self.owner[slot] == RESERVED, f"staging slot {slot} was not in use"
        self.owner[slot] = FREE
        self._ring.append(slot)

    def pin(self, slots: Ints) -> None:
        """Forbid eviction of these (distinct) slots until `unpin`."""
        self.pins[slots] += 1

    def unpin(self, slots: Ints) -> None:
        """Undo one `pin`."""
        self.pins[slots] -= 1

    def evictable(self) -> Ints:
        """Cache slots that hold an expert nobody has pinned."""
        cache = slice(0, self.cache_slots)
        return np.flatnonzero((self.owner[cache] >= 0) & (self.pins[cache] == 0))

    def check(self, *, idle: bool = True) -> None:
        """Raise AssertionError unless owners, map and free lists agree.

        `idle`: and nothing is pinned, being filled or staged.
        """
        held = np.flatnonzero(self.owner >= 0)
        mapped = np.flatnonzero(self.slot_of >= 0)
        assert len(held) == len(mapped), f"{len(held)} slots owned, {len(mapped)} experts mapped"
        assert (self.slot_of[self.owner[held]] == held).all(), "owners and slot map disagree"
        assert not len(held) or held[-1] < self.cache_slots, "a staging slot is owned"
        free = np.flatnonzero(self.owner == FREE).tolist()
        assert sorted([*self._free, *self._ring]) == free, "free lists and owners disagree"
        assert (self.pins >= 0).all(), "a slot was unpinned too often"
        assert not (idle and (self.owner == RESERVED).any()), "a slot is still reserved"
        assert not (idle and self.pins.any()), "a slot is still pinned"
