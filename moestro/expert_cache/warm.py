"""Fills empty tiers before they are asked for.

Owns: which experts a warming loads, and keeping the workers busy with them. It evicts nothing
from slots. From the arena it drops copies of what is in slots; others only when there are free
slots and an arena without such a copy, since what goes to a slot passes through the arena.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from moestro.expert_cache.fetch import NO_SLOT
from moestro.expert_cache.flight import Tiers, failure


def warm(tiers: Tiers, order: Iterable[int], progress: Callable[[int, int], None]) -> None:
    """Load keys in this order: first into free slots, then into the arena, until both are full."""
    keys = list(dict.fromkeys(order))
    seats = [key for key in keys if tiers.table.slot_of[key] < 0][: tiers.table.free]
    total = len(seats) + len(_spares(tiers, keys, seats))
    done = 0

    def landed() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    # Slots first, all of them: their copies in the arena are then the first to leave it.
    _load(tiers, seats, True, landed)
    spares = _spares(tiers, keys, ())
    total = len(seats) + len(spares)
    _load(tiers, spares, False, landed)


def _spares(tiers: Tiers, keys: Sequence[int], seats: Sequence[int]) -> list[int]:
    """The keys to load into the arena only, once `seats` are in slots."""
    slot_of, arena = tiers.table.slot_of, tiers.arena.table
    seated = set(seats)
    stay = {key for key in set(arena.keys()) - seated if slot_of[key] < 0}
    outside = (key for key in keys if slot_of[key] < 0 and key not in seated and key not in stay)
    return [key for key, _ in zip(outside, range(arena.capacity - len(stay)), strict=False)]


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
