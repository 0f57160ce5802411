"""Experts on their way to a sweep: a read that fails takes nothing with it."""

from __future__ import annotations

import pytest
import torch

from moestro.errors import MoestroError
from moestro.expert_cache.device_cache import DeviceCache
from moestro.expert_cache.layout import gated_layout
from moestro.expert_cache.policies import make_policy
from moestro.expert_cache.store import DummyStore
from moestro.expert_cache.stream import GROUPS, ExpertStream


class Flaky(DummyStore):
    """Cannot read one expert while it is `broken`."""

    broken = False

    def read(self, layer: int, expert: int, out: memoryview) -> int:
        if self.broken and expert == 5:
            raise OSError("a bad sector")
        return super().read(layer, expert, out)


def test_a_failed_read_gives_group_and_entries_back() -> None:
    store = Flaky(gated_layout(32, 16, "float32"), 0)
    policy = make_policy("lru", 1, 8)
    sizes = {"slots": 2, "ring": 1, "staging": 2 * GROUPS, "host": 6, "workers": 1}
    cache = DeviceCache(store, 1, 8, policy=policy, device=torch.device("cpu"), **sizes)
    stream = ExpertStream(cache)
    store.broken = True
    for _ in range(GROUPS + 1):
        with pytest.raises(MoestroError):
            stream.start(0, [4, 5])
        cache.arena.table.check()
    store.broken = False
    stream.start(0, [4, 5])
    batch = stream.take()
    for expert, slot in zip(batch.experts, batch.slots, strict=True):
        blob = bytearray(store.layout.nbytes)
        store.read(0, expert, memoryview(blob))
        assert bytes(cache.slab[slot].numpy()) == bytes(blob)
    stream.used(batch)
    stream.drop()
    cache.arena.table.check()
    cache.close()
