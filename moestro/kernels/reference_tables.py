"""The plain Python meaning of the decode step's cache bookkeeping.

Owns: which slot each missing expert gets and in which order routes are computed. The kernel
`gpu.acquire` must leave the same tables behind. Terms and dtypes are those of `gpu.tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NONE, NOT_IN_HOST_MEMORY, NO_SLOT = 0, 1, 2  # faults
FEW = 4  # see gpu.acquire


@dataclass(slots=True)
class Tables:
    """`gpu.tables.CacheTables` as lists."""

    slot_of: list[int]
    owner: list[int]
    source: list[int]
    admit: list[bool]
    victims: list[int]
    ring: int
    experts: int
    cursor: int = 0
    fault: tuple[int, int] = (NONE, 0)
    share: list[int] = field(default_factory=list)  # of so many misses, those left to the CPU


@dataclass(frozen=True, slots=True)
class Job:
    """One blob to copy from host address `source` into `slot`."""

    key: int
    slot: int
    source: int


@dataclass(frozen=True, slots=True)
class CpuJob:
    """One expert that the CPU computes where it lies, and its routes."""

    key: int
    source: int
    routes: list[int]


@dataclass(frozen=True, slots=True)
class Work:
    """What a layer has to copy and compute; nothing at all after a fault."""

    order: list[int]
    group_slot: list[int] = field(default_factory=list)
    group_lo: list[int] = field(default_factory=lambda: [0])
    jobs: list[Job] = field(default_factory=list)
    cpu: list[CpuJob] = field(default_factory=list)


def acquire(layer: int, ids: Sequence[int], tables: Tables) -> Work:
    """Give every expert of `ids` (one for each route, -1 for none) a slot, or leave it to the CPU
    (slot -1).

    Changes the tables, or after a fault, old or new, only `tables.fault`. An expert that is not in
    host memory is reported before a lack of slots.
    """
    routes = [i if 0 <= i < tables.experts else tables.experts for i in ids]
    order = sorted(range(len(routes)), key=lambda route: (routes[route], route))
    needed = sorted(set(routes) - {tables.experts})
    keys = [layer * tables.experts + expert for expert in needed]
    missing = [key for key in keys if tables.slot_of[key] < 0]
    if tables.fault[0] != NONE:
        return Work(order)
    if any(tables.source[key] == 0 for key in missing):
        tables.fault = (NOT_IN_HOST_MEMORY, layer)
        return Work(order)
    count = {key: routes.count(key % tables.experts) for key in keys}
    left = _left_to_cpu(missing, count, tables)
    places = _Places(tables, frozenset(keys))
    given = places.share_out([key for key in missing if key not in left])
    if given is None:
        tables.fault = (NO_SLOT, layer)
        return Work(order)
    jobs = [Job(key, given[key], tables.source[key]) for key in missing if key in given]
    places.enter(given)
    slots = [given[key] if key in given else tables.slot_of[key] for key in keys]
    ends = [sum(i <= expert for i in routes) for expert in needed]
    cpu = [
        CpuJob(key, tables.source[key], [r for r in order if routes[r] == key % tables.experts])
        for key in missing
        if key in left
    ]
    return Work(order, slots, [0, *ends], jobs, cpu)


def _left_to_cpu(missing: Sequence[int], count: dict[int, int], tables: Tables) -> frozenset[int]:
    """Those of the missing keys that get no slot: as many as `share` says, first those with few
    routes (up to FEW are one class), among them those that may not enter the cache."""
    if not tables.share:
        return frozenset()
    worth = sorted(missing, key=lambda key: ((count[key] - 1) // FEW, tables.admit[key], key))
    return frozenset(worth[: tables.share[len(missing)]])


class _Places:
    """The two lists that slots come from, for one layer that needs `keys`."""

    def __init__(self, tables: Tables, keys: frozenset[int]) -> None:
        self._tables = tables
        self._cursor = tables.cursor
        self._victims = self._usable(keys)
        first = len(tables.owner)
        self._ring = iter(range(first, first + tables.ring))

    def share_out(self, missing: Sequence[int]) -> dict[int, int] | None:
        """key -> slot, or None when the slots do not suffice.

        First every admitted key, ascending, takes the next usable victim and every refused key,
        ascending, the next ring slot. Then those who found their own list empty take from what the
        other list has left, again ascending.
        """
        given: dict[int, int] = {}
        admitted = [key for key in missing if self._tables.admit[key]]
        refused = [key for key in missing if not self._tables.admit[key]]
        late = self._take(admitted, self._victims, given)
        early = self._take(refused, self._ring, given)
        left = self._take(late, self._ring, given) + self._take(early, self._victims, given)
        return None if left else given

    def enter(self, given: dict[int, int]) -> None:
        """Write the cache slots among `given` into the tables; the ring's are not entered."""
        tables = self._tables
        tables.cursor = self._cursor
        for key, slot in given.items():
            if slot >= len(tables.owner):
                continue
            if tables.owner[slot] >= 0:
                tables.slot_of[tables.owner[slot]] = -1
            tables.owner[slot] = key
            tables.slot_of[key] = slot

    def _usable(self, keys: frozenset[int]) -> Iterator[int]:
        """Victims that hold nothing this layer needs, each once, from the cursor on and around the
        end. Those passed over are consumed, but only once a later one is taken."""
        victims = self._tables.victims
        for step in range(len(victims)):
            index = (self._tables.cursor + step) % len(victims)
            slot = victims[index]
            if self._tables.owner[slot] not in keys:
                self._cursor = (index + 1) % len(victims)
                yield slot

    @staticmethod
    def _take(keys: list[int], places: Iterator[int], given: dict[int, int]) -> list[int]:
        """Give the next places to `keys`; return the keys that got none."""
        for n, key in enumerate(keys):
            place = next(places, None)
            if place is None:
                return keys[n:]
            given[key] = place
        return []
