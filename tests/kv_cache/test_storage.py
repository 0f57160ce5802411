"""The KV pool's memory: what is written at a place is read from that place, in that layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from moestro.kv_cache.groups import group_layers
from moestro.kv_cache.spec import LatentKV, PagedKV
from moestro.kv_cache.storage import KVStorage


def storage() -> KVStorage:
    layers = [PagedKV(1, 2, 8, 4, block_size=4)] * 3
    return KVStorage(group_layers(layers), 5, torch.float32)


def test_gather_returns_what_was_written_in_order() -> None:
    kv = storage()
    blocks = torch.tensor([3, 0])
    rows = blocks * kv.layers
    positions = torch.arange(7)
    places = rows[positions // 4] * 4 + positions % 4
    written = {}
    for layer in range(3):
        new = torch.randn(7, 2, 2, 8)
        written[layer] = new
        kv.view(layer).write(places, new)
    for layer in range(3):
        found = kv.view(layer).gather(rows)
        assert found.shape == (8, 2, 2, 8)
        assert torch.equal(found[:7], written[layer])
        assert not found[7].any(), "a place that was never written is zero"
    batch = kv.view(1).gather(torch.stack([rows, rows.flip(0)]))
    assert torch.equal(batch[1, 4:8], written[1][:4])


def test_scrub_touches_only_what_is_not_finite() -> None:
    kv = storage()
    good = torch.randn(1, 2, 2, 8)
    kv.view(0).write(torch.tensor([0]), good)
    bad = torch.full((1, 2, 2, 8), float("nan"))
    kv.view(2).write(torch.tensor([1 * kv.layers * 4]), bad)
    kv.scrub([0, 1])
    assert torch.equal(kv.view(0).gather(torch.tensor([0]))[:1], good)
    assert not kv.view(2).gather(torch.tensor([3])).any()


def test_what_latent_attention_keeps_of_a_token() -> None:
    memory = LatentKV(layers=3, rank=20, rotated=8, dtype_bytes=4, block_size=4)
    assert (memory.token_bytes, memory.block_bytes) == (3 * 28 * 4, 3 * 28 * 4 * 4)
    kv = KVStorage(group_layers([replace(memory, layers=1)] * 3), 5, torch.float32)
    assert kv.nbytes == 5 * memory.block_bytes
    rows, new = torch.tensor([3, 0]) * kv.layers, torch.randn(2, 28)
    kv.view(2).write(torch.stack([rows[1] * 4 + 1, rows[0] * 4 + 3]), new)
    found = kv.view(2).gather(rows)
    assert found.shape == (8, 28)
    assert torch.equal(found[[5, 3]], new)
    assert not kv.view(1).gather(rows).any()
