"""Fills empty tiers in the background, while requests are served.

Owns: which experts come, in which order and how many at once. Readers of its own bring them from
disk into the arena; the engine's thread does all bookkeeping, in `pump`, between steps. Evicts
nothing from slots. From the arena it drops copies of what is in slots; others only while slots are
free and the arena has no such copy, since what goes to a slot passes through the arena.

**Demand overtakes.** Whoever needs an expert brings it by the usual path, and the fill then finds
it there. One that is being read for the fill must not be read twice: `join` waits for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from moestro.expert_cache.arena_table import ArenaTable
from moestro.expert_cache.fetch import NO_SLOT, Fetch, Fetcher
from moestro.expert_cache.flight import failure
from moestro.expert_cache.slot_table import SlotTable
from moestro.stats import FillStats

log = logging.getLogger(__name__)

BESIDE_WORK = 8  # reads at once while requests run, which need the disk themselves
ALONE = 32  # and while none does
MOST_MOVES = 16  # experts that one `pump` copies from the arena to slots without reading them
REPORT_SECONDS = 10.0  # between two lines of the log


class Fill:
    """One filling, from start to end. All methods are for the thread that owns the tables.

    `copy(entry, slot)` copies an arena entry to a slot and returns when that is done; `moved` hears
    of each read. The fetcher is closed when the fill is over.
    """

    def __init__(
        self,
        table: SlotTable,
        arena: ArenaTable,
        fetcher: Fetcher,
        order: Iterable[int],
        experts: int,
        copy: Callable[[int, int], None],
        moved: Callable[[Fetch], None],
    ) -> None:
        self._table = table
        self._arena = arena
        self._fetcher = fetcher
        self._todo = deque(dict.fromkeys(order))
        self._experts = experts
        self._copy = copy
        self._moved = moved
        self._flying: set[int] = set()
        # Half is left to demand, whatever happens.
        self._most = max(1, arena.capacity // 2)
        self._failed = 0
        self._began = self._reported = monotonic()
        self.active = True

    @property
    def flying(self) -> frozenset[int]:
        """Keys that are being read: leased in the arena, and not filled yet."""
        return frozenset(self._flying)

    @property
    def due(self) -> bool:
        """Whether enough has arrived for a `pump` to be worth a gap between two steps."""
        return self.active and self._fetcher.ended * 2 >= len(self._flying)

    def pump(self, *, beside_work: bool) -> bool:
        """Take what has arrived and start more; returns at once, with whether any table changed."""
        if not self.active:
            return False
        changed = False
        while (fetch := self._fetcher.arrived()) is not None:
            self._land(fetch)
            changed = True
        changed |= self._start(BESIDE_WORK if beside_work else ALONE)
        self._report()
        return changed

    def join(self, keys: Iterable[int]) -> bool:
        """Wait for those of `keys` that are being read; whether there were any.

        StepFailed when the disk hangs.
        """
        awaited = self._flying.intersection(keys)
        while not awaited.isdisjoint(self._flying):
            self._land(self._fetcher.wait())
        return bool(awaited)

    def drain(self) -> bool:
        """Wait for everything that is being read; whether there was any."""
        return self.join(self.flying)

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Fill to the end, waiting. `progress(resident, total)` counts experts."""
        while self.active:
            moved = self.pump(beside_work=False)
            assert moved or self._flying or not self.active, "somebody else leases all the arena"
            if self._flying:
                self._land(self._fetcher.wait())
            progress(self.resident, self.total)

    @property
    def total(self) -> int:
        """Experts that the tiers hold together, of those there are."""
        room = self._table.cache_slots + self._arena.capacity
        return min(room, len(self._table.slot_of))

    @property
    def resident(self) -> int:
        """Experts in a slot or in the arena, whoever brought them."""
        seated = len(self._table.slot_of) - int((self._table.slot_of < 0).sum())
        return seated + self._arena.alone - len(self._flying)

    def stats(self) -> FillStats:
        """A snapshot."""
        return FillStats(self.active, self.total, self.resident, self._failed)

    def close(self) -> None:
        """Give up what is left. Waits for the readers."""
        self._todo.clear()
        self._end()

    def _start(self, most: int) -> bool:
        """Start reads until `most` are under way, or the tiers are full: then it is over."""
        moves = 0
        before = len(self._todo)
        while self._todo and len(self._flying) < min(most, self._most) and moves < MOST_MOVES:
            key = self._todo[0]
            if self._table.slot_of[key] >= 0:
                self._todo.popleft()
            elif key in self._arena:
                self._todo.popleft()
                moves += self._move(key)
            elif not self._start_one(key):
                break
        if not self._todo and not self._flying:
            self._end()
        return len(self._todo) != before

    def _start_one(self, key: int) -> bool:
        if self._table.free <= len(self._flying) and not self._arena.spare:
            if not self._flying:
                self._todo.clear()  # all is full
            return False
        claim = self._arena.lease(key)
        if claim is None:
            return False
        self._todo.popleft()
        self._flying.add(key)
        layer, expert = divmod(key, self._experts)
        self._fetcher.submit(Fetch(key, layer, expert, claim.entry, False, NO_SLOT, False))
        return True

    def _move(self, key: int) -> bool:
        """Give an expert of the arena a slot that nobody is on the way to."""
        if self._table.free <= len(self._flying):
            return False
        claim = self._arena.lease(key)
        assert claim is not None and claim.filled
        place_free(self._table, self._arena, key, self._copy)
        return True

    def _land(self, fetch: Fetch) -> None:
        self._flying.remove(fetch.key)
        self._moved(fetch)
        if fetch.error is None:
            place_free(self._table, self._arena, fetch.key, self._copy)
            return
        self._arena.release(fetch.key, filled=False)
        self._failed += 1
        if self._failed == 1:
            message = failure(fetch).message
            log.error("an expert was not loaded: %s; what needs it tries again", message)

    def _report(self) -> None:
        now = monotonic()
        if self.active and now - self._reported >= REPORT_SECONDS:
            self._reported = now
            log.info("%d of %d experts are in memory", self.resident, self.total)

    def _end(self) -> None:
        if not self.active:
            return
        self.active = False
        self._fetcher.close()
        took = monotonic() - self._began
        log.info(
            "%d of %d experts are in memory, %.1f s after the start%s",
            self.resident,
            len(self._table.slot_of),
            took,
            f"; {self._failed} could not be read" if self._failed else "",
        )


def place_free(
    table: SlotTable, arena: ArenaTable, key: int, copy: Callable[[int, int], None]
) -> None:
    """Copy a filled entry, which is leased, to a free slot if there is one and the expert is in
    none; then close the lease. `copy(entry, slot)` returns when it is done."""
    slot = None if table.slot_of[key] >= 0 else table.reserve()
    try:
        if slot is not None:
            copy(arena.entry(key), slot)
            table.bind(slot, key)
            arena.shadow(key, True)
            slot = None
    finally:
        if slot is not None:
            table.release(slot)
        arena.release(key, filled=True)
