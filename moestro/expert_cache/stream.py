"""Brings experts to the device for sweeps, some groups ahead of the computing.

Owns: the staging groups and the copy stream. Does not own: which experts a layer needs, or which of
them stay (`engine.gpu.sweep` asks `residency`). A group is filled by the copy engine while an
earlier one is computed with; events keep the two apart, and the host waits for neither.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from moestro.errors import MoestroError, StepFailed
from moestro.expert_cache.device_cache import DeviceCache
from moestro.expert_cache.flight import failure
from moestro.kernels.gpu.transfer import Mark, Stream

GROUPS = 3  # one is computed with while two are filled
MOST_SEATS = 16  # experts that are brought to free slots together


@dataclass(slots=True)
class Batch:
    """Experts of one layer in staging slots, as soon as `ready` has happened."""

    layer: int
    experts: list[int]
    slots: list[int]  # the whole group; the first ones hold the experts
    early: bool  # asked for before the layer's router had spoken
    ready: Mark
    done: Mark  # with computing
    keys: list[int] = field(default_factory=list)  # leases in the arena, while it is read


class ExpertStream:
    """Batches on their way, in order."""

    def __init__(self, cache: DeviceCache) -> None:
        size = len(cache.staging) // GROUPS
        slots = list(cache.staging)
        self.size = size
        self._cache = cache
        self._free = deque(slots[n * size : (n + 1) * size] for n in range(GROUPS))
        self._used: deque[Batch] = deque()  # computed with, or about to be: oldest first
        device = cache.slab.device
        self._copies = Stream(device)
        self._device = device
        self.coming: deque[Batch] = deque()

    @property
    def has_room(self) -> bool:
        """Another batch can be started now."""
        return len(self.coming) < GROUPS - 1

    def start(self, layer: int, experts: list[int], *, early: bool = False) -> None:
        """Start to bring at most `size` experts of a layer, `early` on a guess."""
        assert self.has_room and len(experts) <= self.size
        while not self._free:
            self._retire(self._used.popleft())
        slots = self._free.popleft()
        batch = Batch(layer, experts, slots, early, Mark(self._device), Mark(self._device))
        try:
            self._lease(batch)
        except BaseException:
            self._free.append(slots)
            raise
        with self._copies.use():
            entries = [self._cache.arena.table.entry(key) for key in batch.keys]
            self._cache.link.send(entries, slots[: len(entries)])
            batch.ready.set()
        self.coming.append(batch)

    def seat(self, layer: int, experts: list[int]) -> None:
        """Bring experts of a layer into free slots, waiting for them, where each one has a slot
        and there are no staging groups. For the time until the cache is full."""
        size = max(1, min(MOST_SEATS, self._cache.arena.table.capacity // 2))
        for lo in range(0, len(experts), size):
            part = experts[lo : lo + size]
            batch = Batch(layer, part, [], False, Mark(self._device), Mark(self._device))
            self._lease(batch)
            for key in batch.keys:
                self._cache.place(key)

    def take(self) -> Batch:
        """The next batch; the current stream waits for it, the host does not. Say `used` after."""
        batch = self.coming.popleft()
        self._used.append(batch)
        batch.ready.hold()
        return batch

    def used(self, batch: Batch) -> None:
        """Everything that reads this batch has been launched on the current stream."""
        batch.done.set()

    def drop(self) -> None:
        """Give up what is coming and wait for its copies: nothing is held afterwards."""
        while self.coming:
            self.used(self.take())
        while self._used:
            self._retire(self._used.popleft())

    def _retire(self, batch: Batch) -> None:
        batch.ready.wait()
        for key in batch.keys:
            self._cache.arena.table.release(key, filled=True)
        batch.done.hold(self._copies)
        self._free.append(batch.slots)

    def _lease(self, batch: Batch) -> None:
        """Hold the experts' arena entries, reading from disk what is not there."""
        cache, table = self._cache, self._cache.arena.table
        keys = [batch.layer * cache.experts + expert for expert in batch.experts]
        cache.join(keys)
        reading = 0
        error: MoestroError | None = None
        unfilled: set[int] = set()  # leased, and what was to be read did not come
        for key in keys:
            claim = table.lease(key)
            while claim is None and (self._used or cache.give_way()):
                if self._used:
                    self._retire(self._used.popleft())
                claim = table.lease(key)
            if claim is None:
                error = StepFailed("the host arena is too small for a sweep")
                break
            batch.keys.append(key)
            if not claim.filled:
                cache.dirty = True  # an entry changes hands: the device has its old address
                cache.read(key, claim.entry)
                reading += 1
        for _ in range(reading):
            fetch = cache.landed()
            if fetch.error is not None:
                unfilled.add(fetch.key)
                error = error or failure(fetch)
        if error is not None:
            for key in batch.keys:
                table.release(key, filled=key not in unfilled)
            raise error
