"""The expert cache of a CUDA device, seen from the host.

Owns: the slab of slots, the page-locked arena, and the device's tables: what they hold at the
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
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.fetch import NO_SLOT, Fetch, Fetcher
from moestro.expert_cache.flight import Tiers
from moestro.expert_cache.layout import DTYPE_BYTES
from moestro.expert_cache.meter import Meter
from moestro.expert_cache.policy import Floats, Ints, Policy
from moestro.expert_cache.residency import Residency
from moestro.expert_cache.slot_table import FREE
from moestro.expert_cache.slots import SlotPool
from moestro.expert_cache.store import ExpertStore
from moestro.expert_cache.trace import TraceWriter, distinct
from moestro.expert_cache.warm import warm
from moestro.kernels.gpu.tables import CacheTables
from moestro.kernels.gpu.transfer import upload
from moestro.stats import ExpertStats

IDLE = 2  # passes; an expert used more recently is in the working set
SLACK = 16  # victims beyond the misses of the last step that may be taken by the next one


class DeviceCache:
    """Experts of one model on one CUDA device."""

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
    ) -> None:
        layout = store.layout
        self.layers, self.experts, self.slots = layers, experts, slots
        self.layout = layout
        self.staging = range(slots + ring, slots + ring + staging)
        dtype = getattr(torch, layout.dtype)
        self._store = store
        self._pool = SlotPool(layout, slots + ring + staging, device, dtype)
        self.slab = self._pool.slab
        self.arena = HostArena(layout, host, pinned=device.type == "cuda")
        self.residency = Residency(layers, experts, slots, 0, policy)
        self.table = self.residency.table
        self._fetcher = Fetcher(store, self.arena, self._pool, workers)
        self._meter = Meter(layers, layout.nbytes)
        self.tiers = Tiers(self.table, self.arena, self._fetcher, self._meter, experts)
        self.trace = trace
        self._device = device
        self._tables_on(device, slots, ring)
        self.recent = 0  # misses of the last step
        self.dirty = True  # the host's tables have moved on from the device's
        self._taken = np.zeros(0, np.int64)  # victims that a launched step may have taken
        self.complete = slots >= layers * experts  # everything fits: nothing ever leaves

    def _tables_on(self, device: torch.device, slots: int, ring: int) -> None:
        """Lay all tables but the addresses out in one piece of memory, for one upload."""
        keys = self.layers * self.experts
        sizes = [("fault", 2), ("slot_of", keys), ("owner", slots)]
        sizes += [("victims", slots), ("cursor", 2), ("admit", -(-keys // 4))]
        self._packed = torch.zeros(sum(n for _, n in sizes), dtype=torch.int32, device=device)
        spans, lo = {}, 0
        for name, size in sizes:
            spans[name] = slice(lo, lo + size)
            lo += size
        self._spans = spans
        view = {name: self._packed[span] for name, span in spans.items()}
        self.tables = CacheTables(
            slot_of=view["slot_of"],
            owner=view["owner"],
            source=torch.zeros(keys, dtype=torch.int64, device=device),
            admit=view["admit"].view(torch.uint8)[:keys],
            victims=view["victims"],
            cursor=view["cursor"],
            fault=view["fault"],
            slots=slots,
            ring=ring,
            experts=self.experts,
        )

    # Start

    def warm(
        self, order: Iterable[int], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Load keys in this order until the slots, then the arena, are full."""
        self.tiers.settle()
        warm(self.tiers, order, progress or (lambda done, total: None))
        self.upload()

    def preferred_order(self) -> list[int]:
        """All keys in the policy's order of worth, for `warm`."""
        order: list[int] = self.residency.preferred().tolist()
        return order

    def forget_counts(self) -> None:
        """Count from zero: what ran so far served nobody."""
        self._meter = Meter(self.layers, self.layout.nbytes)
        self.tiers = replace(self.tiers, meter=self._meter)

    # Decode

    def upload(self) -> None:
        """Make the device's tables say what the host's say. No step may be in flight."""
        self._taken = np.zeros(0, np.int64)
        self.dirty = False
        packed = np.zeros(len(self._packed), np.int32)
        packed[self._spans["slot_of"]] = self.table.slot_of
        packed[self._spans["owner"]] = self.table.owner
        self._rank_into(packed)
        upload(packed, self._packed)
        self._upload_sources()

    def refresh(self) -> None:
        """Upload what may leave in the next step and what may come in."""
        if self.complete:
            return
        packed = np.zeros(len(self._packed), np.int32)
        self._rank_into(packed)
        lo = self._spans["victims"].start
        upload(packed[lo:], self._packed[lo:])

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
        seconds: Floats,
        sequences: Sequence[str],
    ) -> None:
        """Record what a decode step did: routed `ids` [layers, rows, top_k] of `sequences`, and for
        each layer its number of fetches, their keys and slots [layers, G]. `seconds` [layers] were
        exposed."""
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
        kept = self._replaced(n_jobs, keys, slots) if self.recent else 0
        self._meter.step(wanted, n_jobs, seconds, staged=self.recent - kept)

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
        if self.trace is None and not policy.wants_sequences:
            return
        names, row_of = distinct(sequences)
        for layer, routed in enumerate(ids):
            if policy.wants_sequences:
                policy.observe(names, layer, routed, row_of)
            if self.trace is not None:
                self.trace.record(layer, routed, names, row_of)

    def _shadow(self, gone: Ints, came: Ints) -> None:
        arena = self.arena.table
        for key in gone.tolist():
            arena.shadow(key, False)
        for key in came.tolist():
            arena.shadow(key, True)

    def _rank_into(self, packed: Ints) -> None:
        victims, admit = self._ranking()
        packed[self._spans["cursor"]] = 0, len(victims)
        lo = self._spans["victims"].start
        packed[lo : lo + len(victims)] = victims
        packed[self._spans["admit"]].view(np.uint8)[: len(admit)] = admit

    def _ranking(self) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Slots in the order in which they may be taken, and which keys may take them."""
        residency, policy, owner = self.residency, self.residency.policy, self.table.owner
        free = np.flatnonzero(owner == FREE)
        held = np.flatnonzero(owner >= 0)
        order = held[policy.rank(owner[held], residency.clock)]
        if residency.crowded:
            idle = residency.idle(owner[order], IDLE)
            order = np.concatenate((order[idle], order[~idle]))
        # A step that is under way takes from the list it was given: these come last now.
        order = np.concatenate((free, order))
        mine = np.isin(order, self._taken)
        order = np.concatenate((order[~mine], order[mine]))
        expected = min(len(order) - 1, self.recent + SLACK)
        self._taken = order[: expected + 1]
        worst = int(owner[order[min(len(order) - 1, self.recent // 2)]])
        if worst < 0:
            return order, np.ones(len(self.table.slot_of), np.bool_)
        admit = policy.admits(np.arange(len(self.table.slot_of)), worst, residency.clock)
        return order, admit

    def _upload_sources(self) -> None:
        sources = np.zeros(len(self.table.slot_of), np.int64)
        # Where the device cannot read the arena, every miss goes through a sweep.
        if self.arena.pinned or self._device.type == "cpu":
            for key, entry in self.arena.table.entries():
                sources[key] = self.arena.address(entry)
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

    def swept(self, layer: int, hits: int, fetched: int) -> None:
        """A sweep used a layer's experts: those in slots, and those brought from host memory."""
        self._meter.sweep(layer, hits, fetched)

    # Looking in

    @property
    def notes(self) -> tuple[str, ...]:
        """What start-up should tell people."""
        report = self.arena.lock_report
        return () if report is None or report.note is None else (report.note,)

    def stats(self) -> ExpertStats:
        """A snapshot of the counters."""
        return self._meter.stats(self.residency, self.arena.table)

    def check(self, *, verify_bytes: bool = False) -> None:
        """Raise AssertionError unless all tables agree. Call when no step is in flight.

        `verify_bytes` also compares every expert in a slot with what the store reads.
        """
        self.table.check()
        self.arena.table.check()
        if self.dirty:
            self.upload()
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
            size = part.shape[0] * part.shape[1] * DTYPE_BYTES[self.layout.dtype]
            span = slice(part.offset, part.offset + size)
            assert (found[span] == blob[span]).all(), f"slot {slot}: {part.name} is not of {key}"

    def close(self) -> None:
        """End the threads and unlock the arena."""
        self._fetcher.close()
        self.arena.close()
