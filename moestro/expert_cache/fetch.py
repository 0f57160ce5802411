"""Threads that move bytes: disk to arena to slot.

Owns: the threads and their two queues. A worker touches memory that its `Fetch` names and
nothing else; every table is kept by the thread that submits and collects.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter

from moestro.errors import ConfigError, StepFailed
from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.slots import SlotPool
from moestro.expert_cache.store import ExpertStore

FETCH_SECONDS = 120.0  # longest wait for one fetch; a disk that takes longer is broken


NO_SLOT = -1  # in place of a slot: bring it as far as the arena


@dataclass(slots=True)
class Fetch:
    """One expert on its way. The second half is filled by the worker."""

    key: int
    layer: int
    expert: int
    entry: int  # of the arena, leased until this has been collected
    filled: bool  # the entry holds the expert already
    slot: int  # reserved, or NO_SLOT
    staged: bool  # the slot is one of the staging ring
    seconds: float = 0.0
    disk_bytes: int = 0
    error: Exception | None = None


class Fetcher:
    """`workers` threads. All methods are for the one thread that owns the tables."""

    def __init__(self, store: ExpertStore, arena: HostArena, pool: SlotPool, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"{workers} fetch workers; at least 1 is needed")
        self._store = store
        self._arena = arena
        self._pool = pool
        self.flying = 0  # submitted and not yet collected
        self._todo: SimpleQueue[Fetch | None] = SimpleQueue()
        self._done: SimpleQueue[Fetch] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-fetch-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fetch: Fetch) -> None:
        """Start a fetch as soon as a worker is free, in order of submission."""
        self.flying += 1
        self._todo.put(fetch)

    @property
    def ended(self) -> int:
        """How many have ended and were not collected yet."""
        return self._done.qsize()

    def arrived(self) -> Fetch | None:
        """One that has ended, well or not, without waiting."""
        try:
            fetch = self._done.get_nowait()
        except Empty:
            return None
        self.flying -= 1
        return fetch

    def wait(self) -> Fetch:
        """Wait for one to end; StepFailed after `FETCH_SECONDS`."""
        assert self.flying > 0, "waiting for a fetch that nobody submitted"
        try:
            fetch = self._done.get(timeout=FETCH_SECONDS)
        except Empty:
            raise StepFailed(
                f"no expert arrived for {FETCH_SECONDS:.0f} s; {self.flying} are being fetched"
            ) from None
        self.flying -= 1
        return fetch

    def close(self) -> None:
        """End the threads after what they are doing. Waits at most `FETCH_SECONDS` for each."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(FETCH_SECONDS)

    def _work(self) -> None:
        while (fetch := self._todo.get()) is not None:
            begun = perf_counter()
            try:
                self._move(fetch)
            except Exception as error:  # any failure of a store is this fetch's result
                fetch.error = error
            fetch.seconds = perf_counter() - begun
            self._done.put(fetch)

    def _move(self, fetch: Fetch) -> None:
        blob = self._arena.blob(fetch.entry)
        if not fetch.filled:
            fetch.disk_bytes = self._store.read(fetch.layer, fetch.expert, blob.data)
        if fetch.slot != NO_SLOT:
            self._pool.write(fetch.slot, blob)
