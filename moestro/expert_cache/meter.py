"""Counts what the cache does.

Owns: the running totals behind `ExpertStats`. Decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from moestro.expert_cache.arena_table import ArenaTable
from moestro.expert_cache.fetch import NO_SLOT, Fetch
from moestro.expert_cache.policy import Floats, Ints
from moestro.expert_cache.residency import Residency
from moestro.stats import ExpertStats, LayerExpertStats, TierStats

BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # seconds


class Meter:
    """Totals since start. Seconds of a fetch are those a worker spent on it, not its queueing."""

    def __init__(self, layers: int, expert_bytes: int) -> None:
        self._expert_bytes = expert_bytes
        self.hits = [0] * layers
        self.misses = [0] * layers
        self.exposed = [0.0] * layers
        self.staged = 0
        self.computed = 0
        self._bytes = [0] * layers
        self._from_host = 0
        self._prefetched = np.zeros(2, np.int64)  # useful, wasted
        self._from_disk = 0
        self._host_bytes = 0
        self._disk_bytes = 0
        self._fetches = 0
        self._fetch_seconds = 0.0
        self._latency = [0] * (len(BOUNDS) + 1)

    def fetched(self, fetch: Fetch) -> None:
        """A wanted expert has arrived in a slot."""
        self._fetches += 1
        self._fetch_seconds += fetch.seconds
        self._latency[bisect_left(BOUNDS, fetch.seconds)] += 1
        self._bytes[fetch.layer] += self._expert_bytes
        self._from_host += fetch.filled
        self._from_disk += not fetch.filled
        self.moved(fetch)

    def step(
        self, wanted: Ints, fetched: Ints, computed: Ints, seconds: Floats, *, staged: int
    ) -> None:
        """A decode step on the device: experts wanted, fetched from host memory, computed there,
        and seconds that it stood still for them, for each layer."""
        for layer, (want, got, left, waited) in enumerate(
            zip(wanted.tolist(), fetched.tolist(), computed.tolist(), seconds.tolist(), strict=True)
        ):
            self.hits[layer] += want - got - left
            self.misses[layer] += got + left
            self.exposed[layer] += waited
            self._bytes[layer] += got * self._expert_bytes
        self.computed += int(computed.sum())
        total = int(fetched.sum())
        self.staged += staged
        self._fetches += total
        self._fetch_seconds += float(seconds.sum())
        self._from_host += total
        self._host_bytes += total * self._expert_bytes

    def sweep(self, layer: int, hits: int, fetched: int) -> None:
        """A layer of a sweep on the device: experts in slots, and experts from host memory."""
        self.hits[layer] += hits
        self.misses[layer] += fetched
        self.staged += fetched
        self._fetches += fetched
        self._bytes[layer] += fetched * self._expert_bytes
        self._from_host += fetched
        self._host_bytes += fetched * self._expert_bytes

    def prefetched(self, useful: int, wasted: int) -> None:
        """Experts came before anybody had asked; the useful ones count as wanted elsewhere."""
        self._prefetched += np.array((useful, wasted))
        self._host_bytes += wasted * self._expert_bytes

    def moved(self, fetch: Fetch) -> None:
        """Bytes left a tier, wanted at once or not."""
        self._disk_bytes += fetch.disk_bytes
        if fetch.slot != NO_SLOT:
            self._host_bytes += self._expert_bytes

    def stats(self, residency: Residency, arena: ArenaTable) -> ExpertStats:
        """A snapshot, apart from everything that lives on."""
        table = residency.table
        resident = [int(np.count_nonzero(row >= 0)) for row in table.rows]
        bounds = [*(str(bound) for bound in BOUNDS), "inf"]
        everything = residency.layers * residency.experts
        return ExpertStats(
            policy=residency.policy.name,
            expert_bytes=self._expert_bytes,
            hits=sum(self.hits),
            misses=sum(self.misses),
            evictions=residency.evictions,
            staged=self.staged,
            computed=self.computed,
            exposed_seconds=sum(self.exposed),
            fetch_seconds=self._fetch_seconds,
            fetches=self._fetches,
            prefetch_useful=int(self._prefetched[0]),
            prefetch_wasted=int(self._prefetched[1]),
            slots=TierStats(table.cache_slots, sum(resident), sum(self.hits), 0),
            host=TierStats(arena.capacity, len(arena), self._from_host, self._host_bytes),
            disk=TierStats(0, everything, self._from_disk, self._disk_bytes),
            layers=[
                LayerExpertStats(layer, *row)
                for layer, row in enumerate(
                    zip(resident, self.hits, self.misses, self._bytes, self.exposed, strict=True)
                )
            ],
            fetch_latency_buckets=dict(zip(bounds, self._latency, strict=True)),
        )
