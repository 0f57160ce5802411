"""The counting sort of routes against a stable sort."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from moestro.kernels.gpu import grouping


def check(ids: torch.Tensor, experts: int, device: str) -> None:
    routes = ids.numel()
    out = grouping.Routes.empty(routes + 5, experts, device)
    for tensor in (out.counts, out.offsets, out.order, out.chunks):
        tensor.fill_(-7)
    grouping.sort_routes(ids.to(device), experts, out=out)
    keys = torch.where(ids < 0, experts, ids).view(-1).long()
    counts = torch.bincount(keys, minlength=experts + 1)
    assert out.counts.tolist() == counts.tolist()
    assert out.offsets.tolist() == (counts.cumsum(0) - counts).tolist()
    assert out.order[:routes].tolist() == keys.argsort(stable=True).tolist()
    assert out.order[routes:].tolist() == [-7] * 5


@pytest.mark.parametrize("experts", [1, 6, 60, 128])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (16, 8), (43, 3), (301, 2)])
def test_any_size(device: str, experts: int, tokens: int, k: int) -> None:
    check(torch.randint(experts, (tokens, k), dtype=torch.int32), experts, device)


def test_routes_without_an_expert_come_last(device: str) -> None:
    ids = torch.randint(-1, 8, (77, 4), dtype=torch.int32)
    check(ids, 8, device)
    check(torch.full_like(ids, -1), 8, device)


def test_all_on_one_expert(device: str) -> None:
    check(torch.full((200, 2), 5, dtype=torch.int32), 6, device)
