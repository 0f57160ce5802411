"""The expert cache an engine talks to: ask for the experts of a layer, compute, give them back.

Owns: the three tiers put together, and the lease. Decisions are `residency`'s, the transfers
`flight`'s and `fetch`'s. One thread calls everything here; workers only fill memory.

    cache.begin_pass("decode", rows)
    for layer in ...:
        with cache.acquire(layer, counts) as lease:
            for experts, slots in lease.groups():
                ...  # compute with cache.gate_up[slot], cache.down[slot]

Memory is bounded by `slots` and `host` blobs: nothing else here grows with use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from types import TracebackType

import numpy as np
import torch

from moestro.errors import ConfigError
from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.fetch import Fetcher
from moestro.expert_cache.fill import Fill
from moestro.expert_cache.flight import Flight, Group, Tiers
from moestro.expert_cache.meter import Meter
from moestro.expert_cache.policy import Floats, Ints, Policy
from moestro.expert_cache.residency import NOBODY, STAGE, Kind, Residency
from moestro.expert_cache.slots import SlotPool
from moestro.expert_cache.store import ExpertStore
from moestro.expert_cache.trace import TraceWriter, distinct
from moestro.stats import ExpertStats

MINIMUM_SLOTS = 2  # all of them staging: one is filled while the other is used
MINIMUM_HOST = 2  # one is read from disk while another is copied to a slot


class Lease:
    """The experts of one layer, held for one computation. A context manager; `groups` once."""

    __slots__ = ("_cache", "_flight", "_pinned", "_resident", "layer")

    def __init__(
        self,
        cache: ExpertCache,
        layer: int,
        resident: Group,
        pinned: Ints | None,
        flight: Flight | None,
    ) -> None:
        self.layer = layer
        self._cache: ExpertCache | None = cache
        self._resident = resident
        self._pinned = pinned
        self._flight = flight

    @property
    def exposed(self) -> float:
        """Seconds spent waiting for experts so far."""
        return self._flight.exposed if self._flight else 0.0

    def groups(self) -> Iterator[Group]:
        """Residents first, then fetched experts as they arrive; every wanted one exactly once.

        Asking for the next group says that the last one has been computed with. A failed fetch
        is raised here, after everything has been given back.
        """
        assert self._cache is not None, "the lease is closed"
        if self._flight is None:
            return iter((self._resident,) if self._resident.experts else ())
        return self._arriving(self._flight)

    def close(self) -> None:
        """Give the experts back. Harmless when done before."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache._give_back(self.layer, self._pinned, self._flight)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _arriving(self, flight: Flight) -> Iterator[Group]:
        try:
            if self._resident.experts:
                yield self._resident
            yield from flight.groups()
        except BaseException:
            self.close()
            raise


class ExpertCache:
    """Slots on the device, an arena in host memory, the checkpoint's files.

    `slots` counts all device slots, the last `staging` of which are the ring for experts that are
    not kept (at least 2; there may be no others). `host` counts arena entries, at least 2.
    """

    minimum_slots = MINIMUM_SLOTS
    minimum_host = MINIMUM_HOST

    def __init__(
        self,
        store: ExpertStore,
        layers: int,
        experts: int,
        *,
        slots: int,
        staging: int,
        host: int,
        policy: Policy,
        device: str | torch.device = "cpu",
        workers: int = 2,
        trace: TraceWriter | None = None,
    ) -> None:
        _check_sizes(slots, staging, host)
        layout = store.layout
        self.layers = layers
        self.experts = experts
        self.layout = layout
        self._store = store
        self._trace = trace
        self._residency = Residency(layers, experts, slots, staging, policy)
        self._table = self._residency.table
        self._pool = SlotPool(layout, slots, device, getattr(torch, layout.dtype))
        self._arena = HostArena(layout, host, self._residency.loss)
        self._fetcher = Fetcher(store, self._arena, self._pool, workers)
        self._meter = Meter(layers, layout.nbytes)
        self._tiers = Tiers(self._table, self._arena, self._fetcher, self._meter, experts)
        self._workers = workers
        self._fill: Fill | None = None
        self._open: Lease | None = None
        self.gate_up = self._pool.gate_up  # slot -> [2I, H]
        self.down = self._pool.down  # slot -> [H, I]
        self.packed = self._pool.packed  # slot -> the same two, in a packed layout instead
        self.biases = self._pool.biases  # slot -> [2I] and [H], when the layout has them

    @property
    def wants_ids(self) -> bool:
        """Whether `ids`, `gates` and `sequences` should be given, once a layer and pass: when its
        experts are acquired in several parts, with the first."""
        policy = self._residency.policy
        wants = policy.wants_sequences or policy.wants_gates
        return self._trace is not None or (wants and self._residency.learning)

    def change_policy(self, policy: Policy) -> None:
        """Go on under another policy; what is in memory stays there. No lease may be open."""
        assert self._open is None, "a lease is open"
        self._residency.change_policy(policy)

    def begin_pass(self, kind: Kind = "decode", rows: int = 0, *, resumed: bool = False) -> None:
        """Call before each decode step, and whenever a sweep starts or (`resumed`) goes on."""
        self._residency.begin_pass(kind, resumed=resumed)
        if self._trace is not None:
            self._trace.begin(kind, rows, resumed=resumed)

    def acquire(
        self,
        layer: int,
        counts: Ints,
        *,
        ids: Ints | None = None,
        gates: Floats | None = None,
        sequences: Sequence[str] = (),
        row_of: Ints | None = None,
        whole: Ints | None = None,
    ) -> Lease:
        """Lease the experts of a layer that have a count, and start fetching the missing ones.

        `counts` [experts] are tokens per expert. `ids` [rows, top_k] is the routing they come
        from, `gates` the router's probabilities in the same shape. Row t belongs to
        `sequences[row_of[t]]`, or without `row_of` to `sequences[t]`. When a layer is acquired in
        parts, `whole` are the counts of all of them. One lease at a time.
        """
        assert self._open is None, "the last lease is still open"
        if self._fetcher.flying:
            self._tiers.settle()
        shares = None
        if ids is not None and self.wants_ids:
            shares = self._note(layer, ids, gates, sequences, row_of)
        wanted, slots = self._residency.want(layer, counts, shares)
        listed = slots.tolist()
        if listed and min(listed) < 0:
            return self._fetch(layer, counts if whole is None else whole, wanted, slots)
        # No need to pin: only `acquire` evicts, and it refuses while this lease is open.
        self._meter.hits[layer] += len(listed)
        self._open = lease = Lease(self, layer, Group(wanted.tolist(), listed), None, None)
        return lease

    def finish_sequence(self, sequence: str) -> None:
        """No more rows of this sequence will come. Harmless for an unknown one."""
        self._residency.policy.finish(sequence)
        if self._trace is not None:
            self._trace.finish(sequence)

    def start_fill(self, order: Iterable[int] | None = None) -> None:
        """Begin to load experts into the empty tiers: keys in this order, or in the policy's.

        They come while `fill` is called between steps.
        """
        assert self._fill is None, "there is one fill, at the start"
        self._fill = Fill(
            self._table,
            self._arena.table,
            Fetcher(self._store, self._arena, self._pool, self._workers),
            self._residency.fill_order(self._arena.table.capacity) if order is None else order,
            self.experts,
            lambda entry, slot: self._pool.write(slot, self._arena.blob(entry)),
            self._meter.moved,
        )

    @property
    def filling(self) -> bool:
        """Whether the fill goes on."""
        return self._fill is not None and self._fill.active

    def fill(self, *, beside_work: bool) -> None:
        """Go on with the fill; returns at once. Call between steps, with whether requests run."""
        assert self._open is None, "a lease is open"
        if self._fill is not None:
            self._fill.pump(beside_work=beside_work)

    def finish_fill(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Fill to the end, waiting. `progress(resident, total)` counts experts."""
        assert self._open is None, "a lease is open"
        if self._fill is not None:
            self._fill.run(progress)

    def stats(self) -> ExpertStats:
        """A snapshot of the counters."""
        stats = self._meter.stats(self._residency, self._arena.table)
        if self._fill is not None:
            stats.fill = self._fill.stats()
        return stats

    def check(self, *, verify_bytes: bool = False) -> None:
        """Raise AssertionError unless all tables agree and nothing is open. Call when idle.

        `verify_bytes` also compares every expert in a slot with what the store reads.
        """
        assert self._open is None, "a lease is open"
        assert not self._fetcher.flying, f"{self._fetcher.flying} fetches are flying"
        self._table.check()
        self._arena.table.check(filling=self._fill.flying if self._fill else ())
        in_slots = np.flatnonzero(self._table.slot_of >= 0).tolist()
        self._arena.table.check_shadows(set(in_slots))
        if verify_bytes:
            for key in in_slots:
                self._check_bytes(key)

    def close(self) -> None:
        """End the threads. No lease may be open. The store stays with whoever opened it."""
        assert self._open is None, "a lease is open"
        if self._fill is not None:
            self._fill.close()
        self._fetcher.close()

    def _note(
        self,
        layer: int,
        ids: Ints,
        gates: Floats | None,
        sequences: Sequence[str],
        row_of: Ints | None,
    ) -> Floats | None:
        """Tell trace and policy who routed where; returns mean gate probabilities, [experts]."""
        policy = self._residency.policy
        if policy.wants_sequences or self._trace is not None:
            if row_of is None:
                sequences, row_of = distinct(sequences)
            if policy.wants_sequences and sequences:
                policy.observe(sequences, layer, ids, row_of)
            if self._trace is not None:
                self._trace.record(layer, ids, sequences, row_of)
        if gates is None or not policy.wants_gates:
            return None
        shares = np.bincount(ids.ravel(), gates.ravel(), self.experts)
        return shares / max(1, len(ids))

    def _fetch(self, layer: int, counts: Ints, wanted: Ints, slots: Ints) -> Lease:
        self._tiers.require_settled()
        begun = perf_counter()
        if self._fill is not None and self._fill.join((layer * self.experts + wanted).tolist()):
            slots = self._table.rows[layer][wanted]  # some have just been given one
        waited = perf_counter() - begun
        hit = slots >= 0
        held = slots[hit]
        self._table.pin(held)
        missing = wanted[~hit]
        placements = self._residency.place(layer, missing, counts)
        for place in placements:
            if place.evicted != NOBODY:
                self._arena.table.shadow(place.evicted, False)
        self._meter.hits[layer] += len(held)
        self._meter.misses[layer] += len(missing)
        self._meter.staged += sum(place.slot == STAGE for place in placements)
        resident = Group(wanted[hit].tolist(), held.tolist())
        flight = Flight(self._tiers, placements)
        flight.exposed = waited
        self._open = lease = Lease(self, layer, resident, held, flight)
        return lease

    def _give_back(self, layer: int, pinned: Ints | None, flight: Flight | None) -> None:
        self._open = None
        if pinned is not None:
            self._table.unpin(pinned)
        if flight is not None:
            self._meter.exposed[layer] += flight.exposed
            flight.close()

    def _check_bytes(self, key: int) -> None:
        layer, expert = divmod(key, self.experts)
        slot = int(self._table.slot_of[key])
        blob = np.zeros(self._store.layout.nbytes, np.uint8)
        self._store.read(layer, expert, blob.data)
        found = self._pool.read(slot)
        for part in self._store.layout.parts:
            span = slice(part.offset, part.offset + part.nbytes)
            assert (found[span] == blob[span]).all(), (
                f"slot {slot}: {part.name} is not that of expert {expert} of MoE layer {layer}"
            )


def _check_sizes(slots: int, staging: int, host: int) -> None:
    if staging < MINIMUM_SLOTS:
        raise ConfigError(f"{staging} staging slots; at least {MINIMUM_SLOTS} are needed")
    if slots < staging:
        raise ConfigError(f"{slots} expert slots are fewer than the {staging} for staging")
    if host < MINIMUM_HOST:
        raise ConfigError(f"a host arena of {host} experts; at least {MINIMUM_HOST} are needed")
