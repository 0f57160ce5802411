"""Experts whose bytes say which expert they are, and stores of them that can fail or wait."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque

import numpy as np
import torch

from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.cache import ExpertCache
from moestro.expert_cache.fetch import Fetch
from moestro.expert_cache.layout import ExpertLayout, gated_layout
from moestro.expert_cache.policies import make_policy
from moestro.expert_cache.policy import Policy

LAYOUT = gated_layout(8, 4, "float32")  # gate_up [8, 8], down [8, 4]


class FakeStore:
    """gate_up of expert (l, e) is all l * 1000 + e, down its negative minus one half."""

    def __init__(self, layout: ExpertLayout = LAYOUT, delay: float = 0.0) -> None:
        self.layout = layout
        self.delay = delay
        self.broken: dict[tuple[int, int], Exception] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.reads: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()

    def read(self, layer: int, expert: int, out: memoryview) -> int:
        with self._lock:
            self.reads[layer, expert] += 1
        self.gate.wait()
        if self.delay:
            time.sleep(self.delay)
        if (layer, expert) in self.broken:
            out[: len(out) // 2] = b"\xff" * (len(out) // 2)  # half of it, then the failure
            raise self.broken[layer, expert]
        blob = np.frombuffer(out, np.float32)
        blob[:64] = layer * 1000 + expert
        blob[64:96] = -(layer * 1000 + expert) - 0.5
        return len(out)


class HeldFetcher:
    """A fetcher without threads: its reads end when a test says so, in any order."""

    def __init__(self, store: FakeStore, arena: HostArena) -> None:
        self.store = store
        self.arena = arena
        self.reading: list[Fetch] = []
        self._done: deque[Fetch] = deque()

    @property
    def ended(self) -> int:
        return len(self._done)

    def submit(self, fetch: Fetch) -> None:
        assert fetch.key not in [other.key for other in self.reading], "it is being read already"
        # What is read now is garbage until the end.
        self.arena.blob(fetch.entry)[:] = 0xEE
        self.reading.append(fetch)

    def finish(self, index: int = 0, *, works: bool = True) -> None:
        if not self.reading:
            return
        fetch = self.reading.pop(index % len(self.reading))
        if works:
            blob = self.arena.blob(fetch.entry)
            fetch.disk_bytes = self.store.read(fetch.layer, fetch.expert, blob.data)
        else:
            fetch.error = OSError("bad sector")
        self._done.append(fetch)

    def arrived(self) -> Fetch | None:
        return self._done.popleft() if self._done else None

    def wait(self) -> Fetch:
        if not self._done:
            self.finish()
        return self._done.popleft()

    def close(self) -> None:
        while self.reading:
            self.finish()


def holds(cache: ExpertCache, slot: int, layer: int, expert: int) -> bool:
    value = layer * 1000 + expert
    return bool(
        torch.all(cache.gate_up[slot] == value) and torch.all(cache.down[slot] == -value - 0.5)
    )


def counts_of(experts: list[int], total: int) -> np.ndarray:
    return np.bincount(np.array(experts, np.int64), minlength=total)


def small_cache(
    store: FakeStore | None = None,
    *,
    layers: int = 2,
    experts: int = 6,
    slots: int = 6,
    staging: int = 2,
    host: int = 2,
    workers: int = 2,
    policy: Policy | None = None,
) -> ExpertCache:
    return ExpertCache(
        store or FakeStore(),
        layers,
        experts,
        slots=slots,
        staging=staging,
        host=host,
        workers=workers,
        policy=policy or make_policy("lru", layers, experts),
    )


def use(cache: ExpertCache, layer: int, experts: list[int], **more: object) -> list[list[int]]:
    """Acquire, check the bytes of every group while it is held, and return the groups' experts."""
    groups = []
    with cache.acquire(layer, counts_of(experts, cache.experts), **more) as lease:  # type: ignore[arg-type]
        for group in lease.groups():
            assert len(group.experts) == len(group.slots) == len(set(group.slots)) > 0
            for expert, slot in zip(group.experts, group.slots, strict=True):
                assert holds(cache, slot, layer, expert)
            groups.append(group.experts)
    flat = [expert for group in groups for expert in group]
    assert sorted(flat) == sorted(set(experts)), "each wanted expert exactly once"
    return groups
