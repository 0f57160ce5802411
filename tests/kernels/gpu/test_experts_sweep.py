"""Grouped products of a sweep against one product an expert in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F

from moestro.kernels.gpu import experts_sweep as kernel
from moestro.kernels.gpu import grouping

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
ALIGN = 256


class Case:
    """A layer's experts in the slots of a slab, and routes to them."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        ids: torch.Tensor,
        experts: int,
        hidden: int = 96,
        inter: int = 40,
    ) -> None:
        self.device, self.dtype, self.ids, self.inter = device, dtype, ids, inter
        tokens, self.k = ids.shape
        self.x = torch.randn(tokens, hidden).to(dtype)
        self.gate_up = (torch.randn(experts, 2 * inter, hidden) * hidden**-0.5).to(dtype)
        self.down = (torch.randn(experts, hidden, inter) * inter**-0.5).to(dtype)
        self.slot = torch.randperm(experts + 2)[:experts].to(torch.int32)
        size = dtype.itemsize
        self.down_offset = -(-2 * inter * hidden * size // ALIGN) * ALIGN
        nbytes = self.down_offset + -(-hidden * inter * size // ALIGN) * ALIGN
        slab = torch.full((experts + 2, nbytes // size), float("nan"), dtype=dtype)
        where = self.slot.long()
        slab[where, : 2 * inter * hidden] = self.gate_up.flatten(1)
        start = self.down_offset // size
        slab[where, start : start + hidden * inter] = self.down.flatten(1)
        self.slab = slab.view(torch.uint8).to(device)
        self.routes = grouping.Routes.empty(ids.numel(), experts, device)
        grouping.sort_routes(ids.to(device), experts, out=self.routes)

    def nans(self, width: int) -> torch.Tensor:
        shape = self.ids.numel(), width
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)

    def run(self, groups: list[int], rows: int, y: torch.Tensor, z: torch.Tensor) -> None:
        expert = torch.tensor(groups, dtype=torch.int32)
        slot = self.slot[expert.long()].to(self.device)
        tiles = kernel.Tiles.empty(self.ids.numel(), len(groups), rows, self.device)
        tiles.table.fill_(-7)
        kernel.plan_tiles(self.routes.offsets, expert.to(self.device), slot, out=tiles)
        x = self.x.to(self.device)
        kernel.sweep_up(x, self.routes.order, tiles, self.slab, self.k, y=y)
        kernel.sweep_down(y, self.routes.order, tiles, self.slab, self.down_offset, z=z)

    def check(self, groups: list[int], y: torch.Tensor, z: torch.Tensor) -> None:
        """Routes of the groups are right, and the others still NaN."""
        y, z = y.cpu().double(), z.cpu().double()
        for route, expert in enumerate(self.ids.view(-1).tolist()):
            if expert not in groups:
                assert torch.isnan(y[route]).all()
                assert torch.isnan(z[route]).all()
                continue
            gate, up = (self.gate_up[expert].double() @ self.x[route // self.k].double()).chunk(2)
            self._close(y[route], F.silu(gate) * up)
            self._close(z[route], self.down[expert].double() @ y[route])

    def _close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def everything(case: Case, groups: list[list[int]], rows: int) -> None:
    y, z = case.nans(case.inter), case.nans(case.x.shape[1])
    for group in groups:
        case.run(group, rows, y, z)
    case.check([expert for group in groups for expert in group], y, z)


@pytest.mark.parametrize("rows", [16, 32])
def test_all_experts_at_once(device: str, dtype: torch.dtype, rows: int) -> None:
    ids = torch.randint(6, (37, 2), dtype=torch.int32)
    everything(Case(device, dtype, ids, 6), [[0, 1, 2, 3, 4, 5]], rows)


def test_some_experts_then_others(device: str) -> None:
    ids = torch.randint(-1, 6, (50, 3), dtype=torch.int32)
    case = Case(device, torch.float16, ids, 6)
    y, z = case.nans(case.inter), case.nans(96)
    case.run([4, 1], 16, y, z)
    case.check([4, 1], y, z)
    case.run([0, 5, 3], 16, y, z)
    case.check([0, 1, 3, 4, 5], y, z)


@pytest.mark.parametrize("rows", [64, 128])
def test_tall_tiles(device: str, dtype: torch.dtype, rows: int) -> None:
    ids = torch.randint(3, (150, 1), dtype=torch.int32)
    everything(Case(device, dtype, ids, 3, hidden=128, inter=72), [[2, 0], [1]], rows)


def test_more_tiles_than_a_bundle(device: str) -> None:
    ids = torch.zeros(16 * 16 + 40, 1, dtype=torch.int32)
    ids[::9] = 1
    everything(Case(device, torch.float16, ids, 2, hidden=64, inter=80), [[0, 1]], 16)


def test_experts_without_routes(device: str) -> None:
    ids = torch.full((3, 2), 7, dtype=torch.int32)
    case = Case(device, torch.float32, ids, 60, hidden=32, inter=24)
    everything(case, [[1, 2], [6, 7, 8]], 16)


def test_height_of_tiles_follows_the_mean() -> None:
    bf16 = torch.bfloat16
    assert [kernel.tile_rows(t * 8, 128, bf16) for t in (16, 256, 1024, 8192)] == [16, 32, 64, 128]
    assert kernel.tile_rows(65536, 128, torch.float32) == 32
