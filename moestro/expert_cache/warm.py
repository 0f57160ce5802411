"""Fills empty tiers before they are asked for.

Owns: which experts a warming loads, and keeping the workers busy with them. It never evicts an
expert from a slot, nor one that sits only in the arena.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from moestro.expert_cache.fetch import NO_SLOT
from moestro.expert_cache.flight import Tiers, failure


def warm(tiers: Tiers, order: Iterable[int], progress: Callable[[int, int], None]) -> None:
    """Load keys in this order: first into free slots, then into the arena, until both are full."""
    seats, spares = plan(tiers, order)
    total = len(seats) + len(spares)
    done = 0

    def landed() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    # Slots first, all of them: their copies in the arena are then the first to leave it.
    _load(tiers, seats, True, landed)
    _load(tiers, spares, False, landed)


def plan(tiers: Tiers, order: Iterable[int]) -> tuple[list[int], list[int]]:
    """The keys to load into slots, and those to load into the arena only."""
    slot_of, arena = tiers.table.slot_of, tiers.arena.table
    outside = [key for key in dict.fromkeys(order) if slot_of[key] < 0]
    seats, rest = outside[: tiers.table.free], outside[tiers.table.free :]
    stay = set(arena.keys()) - set(seats)
    room = arena.capacity - sum(slot_of[key] < 0 for key in stay)
    return seats, [key for key in rest if key not in stay][:room]


def _load(tiers: Tiers, keys: list[int], seated: bool, landed: Callable[[], None]) -> None:
    todo = deque(keys)
    flying = 0
    error: Exception | None = None
    while flying or (todo and error is None):
        while todo and error is None and _start(tiers, todo[0], seated):
            todo.popleft()
            flying += 1
        fetch = tiers.fetcher.wait()
        flying -= 1
        tiers.discard(fetch)
        if fetch.error is not None:
            error = error or failure(fetch)
        elif error is None:
            landed()
    if error is not None:
        raise error


def _start(tiers: Tiers, key: int, seated: bool) -> bool:
    slot = tiers.table.reserve() if seated else NO_SLOT
    assert slot is not None, "more keys than free slots"
    if tiers.start(key, slot, staged=False):
        return True
    if seated:
        tiers.table.release(slot)
    return False
