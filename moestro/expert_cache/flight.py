"""The missing experts of one lease, on their way into slots.

Owns: the order in which they are fetched and handed out, and that every slot and arena entry they
took is given back, however it ends. The engine thread runs all of it; workers only move bytes.

                 start                     land                      next group asked for
    waiting  -----------------> flying ------------> arrived ------> in use -----------------> done
    (a cache slot is reserved   (arena entry         (cache slot     (handed to the caller)
     from the beginning,         leased)              bound, pinned)
     a staging slot from here)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from moestro.errors import MoestroError, StepFailed
from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.fetch import NO_SLOT, Fetch, Fetcher
from moestro.expert_cache.meter import Meter
from moestro.expert_cache.residency import STAGE, Placement
from moestro.expert_cache.slot_table import SlotTable


class Group(NamedTuple):
    """Experts that are ready to compute with: `slots[i]` holds `experts[i]`. Experts ascend, as
    tokens that are sorted by expert do."""

    experts: list[int]
    slots: list[int]


@dataclass(frozen=True, slots=True)
class Tiers:
    """The places a fetch goes through, and what each step of it does to their tables."""

    table: SlotTable
    arena: HostArena
    fetcher: Fetcher
    meter: Meter
    experts: int  # per layer

    def start(self, key: int, slot: int, *, staged: bool) -> bool:
        """Begin a fetch; False when every arena entry is leased."""
        claim = self.arena.table.lease(key)
        if claim is None:
            return False
        layer, expert = divmod(key, self.experts)
        self.fetcher.submit(Fetch(key, layer, expert, claim.entry, claim.filled, slot, staged))
        return True

    def land(self, fetch: Fetch) -> None:
        """A fetch has ended: close its lease; bind its cache slot, or free its slot on error."""
        filled = fetch.filled or fetch.error is None
        self.arena.table.release(fetch.key, filled=filled)
        if fetch.slot == NO_SLOT:
            return
        if fetch.error is not None:
            (self.table.give_stage if fetch.staged else self.table.release)(fetch.slot)
        elif not fetch.staged:
            self.table.bind(fetch.slot, fetch.key)
            self.arena.table.shadow(fetch.key, True)

    def settle(self) -> None:
        """Collect what a wait that was given up has left behind, as far as it has come."""
        while self.fetcher.flying and (fetch := self.fetcher.arrived()) is not None:
            self.discard(fetch)

    def require_settled(self) -> None:
        """StepFailed if a fetch that nobody waits for has not ended: the disk hangs."""
        if self.fetcher.flying:
            raise StepFailed(f"{self.fetcher.flying} expert fetches are stuck")

    def discard(self, fetch: Fetch) -> None:
        """Land a fetch that nobody waits for any more."""
        self.land(fetch)
        self.meter.moved(fetch)
        if fetch.staged and fetch.error is None:
            self.table.give_stage(fetch.slot)


class Flight:
    """Fetches run ahead of the groups: the next ones are copied while the caller computes."""

    def __init__(self, tiers: Tiers, placements: Sequence[Placement]) -> None:
        self._tiers = tiers
        held = tiers.arena.table
        ordered = sorted(placements, key=lambda place: place.key not in held)  # quick ones first
        self._seated = deque(place for place in ordered if place.slot != STAGE)
        self._staged = deque(place for place in ordered if place.slot == STAGE)
        self._flying = 0
        self._arrived: list[Fetch] = []
        self._in_use: list[Fetch] = []
        self._pinned: list[int] = []
        self.exposed = 0.0
        self._pump()

    def groups(self) -> Iterator[Group]:
        """Hand out what has arrived, in groups, until everything has been."""
        while self._flying or self._arrived or self._seated or self._staged:
            self._collect()
            self._in_use = self._choose()
            yield Group([f.expert for f in self._in_use], [f.slot for f in self._in_use])
            self._used()
            self._pump()

    def close(self) -> None:
        """Give everything back. Fetches that are flying are waited for, and kept if admitted."""
        while self._seated:
            self._tiers.table.release(self._seated.popleft().slot)
        self._staged.clear()
        self._used()
        for fetch in self._arrived:
            self._give(fetch)
        self._arrived.clear()
        self._tiers.table.unpin(np.array(self._pinned, np.intp))
        self._pinned.clear()
        while self._flying:
            fetch = self._tiers.fetcher.wait()
            self._flying -= 1
            self._tiers.discard(fetch)

    def _pump(self) -> None:
        """Start what can be started: as far as arena entries and staging slots reach."""
        tiers = self._tiers
        while self._seated:
            place = self._seated[0]
            if not tiers.start(place.key, place.slot, staged=False):
                return
            self._seated.popleft()
            self._flying += 1
        while self._staged:
            slot = tiers.table.take_stage()
            if slot is None:
                return
            if not tiers.start(self._staged[0].key, slot, staged=True):
                tiers.table.give_stage(slot)
                return
            self._staged.popleft()
            self._flying += 1

    def _collect(self) -> None:
        """Land everything that has come; wait if that is nothing. Then keep the workers busy."""
        while (fetch := self._tiers.fetcher.arrived()) is not None:
            self._land(fetch)
        if not self._arrived:
            begun = perf_counter()
            try:
                fetch = self._tiers.fetcher.wait()
            finally:
                self.exposed += perf_counter() - begun
            self._land(fetch)
        self._pump()

    def _land(self, fetch: Fetch) -> None:
        self._flying -= 1
        self._tiers.land(fetch)
        if fetch.error is not None:
            raise failure(fetch)
        self._tiers.meter.fetched(fetch)
        self._arrived.append(fetch)
        if not fetch.staged:
            self._tiers.table.pins[fetch.slot] += 1
            self._pinned.append(fetch.slot)

    def _choose(self) -> list[Fetch]:
        """All admitted arrivals; of the staged ones half the ring, so that the rest can fill."""
        more = self._flying or self._staged
        ring = len(self._tiers.table.owner) - self._tiers.table.cache_slots
        room = max(1, ring // 2) if more else ring
        chosen: list[Fetch] = []
        rest: list[Fetch] = []
        for fetch in self._arrived:
            fits = not fetch.staged or room > 0
            room -= fetch.staged
            (chosen if fits else rest).append(fetch)
        self._arrived = rest
        return sorted(chosen, key=lambda fetch: fetch.expert)

    def _used(self) -> None:
        """The caller is done with the last group."""
        for fetch in self._in_use:
            self._give(fetch)
        self._in_use = []

    def _give(self, fetch: Fetch) -> None:
        if fetch.staged:
            self._tiers.table.give_stage(fetch.slot)


def failure(fetch: Fetch) -> MoestroError:
    """What a failed fetch means to the step that wanted it."""
    if isinstance(fetch.error, MoestroError):
        return fetch.error
    failure = StepFailed(
        f"expert {fetch.expert} of MoE layer {fetch.layer} could not be fetched: {fetch.error!r}"
    )
    failure.__cause__ = fetch.error
    return failure
