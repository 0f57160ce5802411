"""The expert cache of a CUDA device, seen from the host.

Owns: the slab of slots, the host arena, and the device's tables: what they hold at the
start, how the host learns afterwards what a decode step did to them, and what may leave in the
next ones.
Does not own: the decode path itself (`kernels.gpu.acquire` and `fetch` change the tables on the
device) or how a sweep streams experts (`expert_cache.stream`).

Slots 0 .. S-1 are the cache, S .. S+R-1 the ring for what a decode step must not keep, and the last
ones are the sweeps' staging groups. The host's `Residency` mirrors the device's tables: it is exact
whenever every launched step has been collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.cpu_share import CpuShare
from moestro.expert_cache.fetch import NO_SLOT, Fetch, Fetcher
from moestro.expert_cache.fill import Fill, place_free
from moestro.expert_cache.host_link import HostLink
from moestro.expert_cache.meter import Meter
from moestro.expert_cache.packed_tables import PackedTables
from moestro.expert_cache.page_lock import CudaLocker, Locker
from moestro.expert_cache.policy import Floats, Ints, Policy
from moestro.expert_cache.residency import Residency
from moestro.expert_cache.slots import SlotPool
from moestro.expert_cache.store import ExpertStore
from moestro.expert_cache.trace import TraceWriter, distinct
from moestro.expert_cache.victims import Victims
from moestro.kernels.gpu.transfer import Mark, upload
from moestro.stats import ExpertStats


class DeviceCache:
    """Experts of one model on one CUDA device. `locker` is for tests: a CPU needs none."""

    def __init__(
        self,
        store: ExpertStore,
        layers: int,
        experts: int,
        *,
        slots: int,
        ring: int,
        staging: int,
        host: int,
        policy: Policy,
        device: torch.device,
        workers: int,
        trace: TraceWriter | None = None,
        locker: Locker | None = None,
    ) -> None:
        layout = store.layout
        self.layers, self.experts, self.slots = layers, experts, slots
        self.layout = layout
        self.staging = range(slots + ring, slots + ring + staging)
        dtype = getattr(torch, layout.dtype)
        self._store = store
        self._pool = SlotPool(layout, slots + ring + staging, device, dtype)
        self.slab = self._pool.slab
        self.residency = Residency(layers, experts, slots, 0, policy)
        self.table = self.residency.table
        self.arena = HostArena(layout, host, self.residency.loss)
        if device.type == "cuda":
            locker = CudaLocker()
        self.link = HostLink(self.arena, self.slab, locker)
        self._fetcher = Fetcher(store, self.arena, self._pool, workers)
        self._workers = workers
        self._fill: Fill | None = None
        self._meter = Meter(layers, layout.nbytes)
        self.trace = trace
        self._device = device
        self._packed = PackedTables(layers, experts, slots, ring, device)
        self.tables = self._packed.tables
        self.recent = 0  # misses of the last step
        self._kept = 0  # and how many of them got slots
        # The host's tables have moved on from the device's, or the fill waits to change them: an
        # `upload` is due before the next step, which ends running ahead of the host.
        self.dirty = True
        self._victims = Victims(self.residency)
        self.complete = slots >= layers * experts  # everything fits: nothing ever leaves
        self.cpu: CpuShare | None = None  # what computes a share of the misses
        self._no_share = np.zeros(experts + 1, np.int64)

    def share_with(self, cpu: CpuShare) -> None:
        """Have `cpu` compute a share of the misses of decode steps; it is closed with the cache."""
        self.cpu = cpu
        self.dirty = True

    # Start

    def start_fill(self, order: Iterable[int] | None = None) -> None:
        """Begin to load experts into the empty tiers: keys in this order, or in the policy's.

        They come while `fill` or `upload` is called, between steps.
        """
        assert self._fill is None, "there is one fill, at the start"
        self._fill = Fill(
            self.table,
            self.arena.table,
            Fetcher(self._store, self.arena, self._pool, self._workers),
            self.residency.fill_order(self.arena.table.capacity) if order is None else order,
            self.experts,
            self._copy,
            lambda fetch: self._meter.moved(fetch),
        )

    @property
    def filling(self) -> bool:
        """Whether `fill` has something to do: experts to bring, or host memory to lock."""
        return self.link.locking or (self._fill is not None and self._fill.active)

    def fill(self, *, beside_work: bool) -> None:
        """Go on with the fill. No step may be under way: tables change, and entries of the arena
        that its kernels would read. Bounded: one chunk is locked, some experts are copied."""
        if self.link.locking:
            self.link.lock_more()
            self.dirty = True
        if self._fill is not None and self._fill.pump(beside_work=beside_work):
            self.dirty = True

    def finish_fill(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Fill to the end, waiting. `progress(resident, total)` counts experts."""
        while self.link.locking:
            self.fill(beside_work=False)
        if self._fill is not None:
            self._fill.run(progress)
        self.dirty = True

    def join(self, keys: Iterable[int]) -> None:
        """Wait for those of `keys` that the fill is reading: they are in the arena then."""
        if self._fill is not None and self._fill.join(keys):
            self.dirty = True

    def give_way(self) -> bool:
        """Let the fill end what it has begun, so that it leases no entry; False if it had none."""
        gave = self._fill is not None and self._fill.drain()
        self.dirty |= gave
        return gave

    def place(self, key: int) -> None:
        """Give an expert with a filled, leased entry a free slot if it has none; ends the lease."""
        place_free(self.table, self.arena.table, key, self._copy)
        self.dirty = True

    def change_policy(self, policy: Policy) -> None:
        """Go on under another policy; what is in memory stays there."""
        self.residency.change_policy(policy)
        self.dirty = True  # the device's list of victims is the old policy's

    def _copy(self, entry: int, slot: int) -> None:
        """Copy an arena entry to a slot, and wait for that."""
        self.link.send([entry], [slot])
        done = Mark(self._device)
        done.set()
        done.wait()

    def forget_counts(self) -> None:
        """Count from zero: what ran so far served nobody."""
        self._meter = Meter(self.layers, self.layout.nbytes)

    # Decode

    def upload(self) -> None:
        """Make the device's tables say what the host's say. No step may be in flight."""
        self.fill(beside_work=True)
        self._victims.settle()
        self.dirty = False
        victims, admit = self._victims.lists(self.recent, self._kept)
        self._packed.send_all(self.table.slot_of, self.table.owner, victims, admit, self._share())
        self._upload_sources()

    def refresh(self) -> None:
        """Upload what may leave in the next step and what may come in."""
        if self.complete:
            return
        self._packed.send_ranking(*self._victims.lists(self.recent, self._kept), self._share())

    def _share(self) -> Ints:
        return self._no_share if self.cpu is None else self.cpu.split.share

    def faulted(self, n_jobs: Ints, keys: Ints, slots: Ints) -> None:
        """A step found an expert in no memory. What the layers before that did to the tables
        counts; the fault is cleared with the next upload."""
        self._replaced(n_jobs, keys, slots)
        self.dirty = True

    def collect(
        self,
        ids: Ints,
        n_jobs: Ints,
        keys: Ints,
        slots: Ints,
        n_cpu: Ints,
        seconds: Floats,
        sequences: Sequence[str],
    ) -> None:
        """Record what a decode step did: routed `ids` [layers, rows, top_k] of `sequences`, and for
        each layer its number of fetches, their keys and slots [layers, G], and its number of misses
        that the CPU computed. `seconds` [layers] were exposed."""
        residency = self.residency
        residency.begin_pass("decode")
        if self.trace is not None:
            self.trace.begin("decode", len(sequences))
        self._note(ids, sequences)
        offsets = np.arange(self.layers)[:, None] * self.experts
        counts = np.bincount(
            (ids.reshape(self.layers, -1) + offsets).ravel(), minlength=len(self.table.slot_of)
        )
        wanted = residency.want_all(counts)
        self.recent = int(n_jobs.sum())
        self._kept = self._replaced(n_jobs, keys, slots) if self.recent else 0
        if self.link.locking or (self._fill is not None and self._fill.due):
            self.dirty = True
        self._meter.step(wanted, n_jobs, n_cpu, seconds, staged=self.recent - self._kept)

    def _replaced(self, n_jobs: Ints, keys: Ints, slots: Ints) -> int:
        """Repeat on the host's tables what a step's fetches did to the device's; how many of them
        went to slots of the cache."""
        fetched = np.arange(keys.shape[1])[None, :] < n_jobs[:, None]
        keys, slots = keys[fetched], slots[fetched]
        kept = slots < self.slots
        gone = self.table.replace(keys[kept], slots[kept])
        self.residency.evictions += len(gone)
        here = keys[kept]
        self._shadow(gone, here[self.table.slot_of[here] >= 0])
        return int(kept.sum())

    def _note(self, ids: Ints, sequences: Sequence[str]) -> None:
        """Tell trace and policy who routed where."""
        policy = self.residency.policy
        if policy.wants_sequences and self.residency.learning:
            policy.observe_pass(sequences, ids)
        if self.trace is not None:
            names, row_of = distinct(sequences)
            for layer, routed in enumerate(ids):
                self.trace.record(layer, routed, names, row_of)

    def _shadow(self, gone: Ints, came: Ints) -> None:
        arena = self.arena.table
        for key in gone.tolist():
            arena.shadow(key, False)
        for key in came.tolist():
            arena.shadow(key, True)

    def _upload_sources(self) -> None:
        """Where the device can read which expert itself. What is not locked, or still being read,
        it cannot: a step that wants it faults and goes through a sweep."""
        held = self.arena.table.entries()
        for key in self._fill.flying if self._fill is not None else ():
            del held[key]
        keys = np.fromiter(held.keys(), np.int64, len(held))
        entries = np.fromiter(held.values(), np.int64, len(held))
        readable = entries < self.link.readable
        sources = np.zeros(len(self.table.slot_of), np.int64)
        start = self.arena.address(0)
        sources[keys[readable]] = start + entries[readable] * self.layout.nbytes
        upload(sources, self.tables.source)

    # Sweeps

    def read(self, key: int, entry: int) -> None:
        """Start to read an expert from disk into an arena entry that the caller leases."""
        layer, expert = divmod(key, self.experts)
        self._fetcher.submit(Fetch(key, layer, expert, entry, False, NO_SLOT, False))

    def landed(self) -> Fetch:
        """Wait for one `read` to end, well or not."""
        fetch = self._fetcher.wait()
        self._meter.moved(fetch)
        return fetch

    def finish_sequence(self, sequence: str) -> None:
        """No more rows of this sequence will come. Harmless for an unknown one."""
        self.residency.policy.finish(sequence)
        if self.trace is not None:
            self.trace.finish(sequence)

    def prefetched(self, useful: int, wasted: int) -> None:
        """Experts were brought on a guess: so many were wanted, so many were not."""
        self._meter.prefetched(useful, wasted)

    def swept(self, layer: int, hits: int, fetched: int) -> None:
        """A sweep used a layer's experts: those in slots, and those brought from host memory."""
        self._meter.sweep(layer, hits, fetched)

    # Looking in

    @property
    def notes(self) -> tuple[str, ...]:
        """What start-up should tell people, as far as it is known then."""
        notes = [] if self.link.note is None else [self.link.note]
        if self.cpu is not None:
            notes.append(f"The CPU computes a share of what misses ({self.cpu.description}).")
        return tuple(notes)

    def stats(self) -> ExpertStats:
        """A snapshot of the counters."""
        stats = self._meter.stats(self.residency, self.arena.table)
        if self._fill is not None:
            stats.fill = self._fill.stats()
        stats.fill.locked_bytes = self.link.locked_bytes
        return stats

    def check(self, *, verify_bytes: bool = False) -> None:
        """Raise AssertionError unless all tables agree. Call when no step is in flight.

        `verify_bytes` also compares every expert in a slot with what the store reads.
        """
        if self.dirty:
            self.upload()
        self.table.check()
        self.arena.table.check(filling=self._fill.flying if self._fill is not None else ())
        found = self.tables.slot_of.cpu().numpy(), self.tables.owner.cpu().numpy()
        assert (found[0] == self.table.slot_of).all(), "the device's slots are not the host's"
        assert (found[1] == self.table.owner).all(), "the device's owners are not the host's"
        assert int(self.tables.fault[0]) == 0, "a fault is pending"
        if verify_bytes:
            for key in np.flatnonzero(self.table.slot_of >= 0).tolist():
                self._check_bytes(key)

    def _check_bytes(self, key: int) -> None:
        slot = int(self.table.slot_of[key])
        blob = np.zeros(self.layout.nbytes, np.uint8)
        self._store.read(*divmod(key, self.experts), blob.data)
        found = self._pool.read(slot)
        for part in self.layout.parts:
            span = slice(part.offset, part.offset + part.nbytes)
            assert (found[span] == blob[span]).all(), f"slot {slot}: {part.name} is not of {key}"

    def close(self) -> None:
        """End the threads and unlock the arena."""
        if self.cpu is not None:
            self.cpu.close()
        if self._fill is not None:
            self._fill.close()
        self._fetcher.close()
        self.link.close()
