"""The expert kernels against plain matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from moestro.kernels import reference
from moestro.kernels import reference_tables as plain
from moestro.kernels.gpu import experts
from moestro.kernels.gpu.experts import Shape
from moestro.kernels.gpu.tables import LayerWork

SLOTS = 9


@dataclass
class Layer:
    """Random blobs in slots, and the routes of one step."""

    gate_up: torch.Tensor  # [SLOTS, 2I, H]
    down: torch.Tensor  # [SLOTS, H, I]
    slab: torch.Tensor
    work: LayerWork
    slots: dict[int, int]  # of an expert
    ids: list[int]

    def up(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """y [P, I] as the reference has it, NaN where no expert is asked for."""
        y = x.new_full((len(self.ids), self.down.shape[2]), torch.nan)
        for route, expert in enumerate(self.ids):
            if expert >= 0:
                wide = self.gate_up[self.slots[expert]].float() @ x[route // k].float()
                y[route] = reference.swiglu(wide).to(x.dtype)
        return y

    def out(self, y: torch.Tensor) -> torch.Tensor:
        """z [P, H] in float32."""
        z = torch.full((len(self.ids), self.down.shape[1]), torch.nan, device=y.device)
        for route, expert in enumerate(self.ids):
            if expert >= 0:
                z[route] = self.down[self.slots[expert]].float() @ y[route].float()
        return z


def blobs(hidden: int, inner: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """gate_up, down, and the slab that holds both, poisoned between them."""
    gate_up = (torch.randn(SLOTS, 2 * inner, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(SLOTS, hidden, inner, device=device) / inner**0.5).to(dtype)
    size = dtype.itemsize
    first = -(-2 * inner * hidden * size // 256) * 256
    total = first + -(-hidden * inner * size // 256) * 256
    slab = torch.full((SLOTS, total // size), torch.nan, dtype=dtype, device=device)
    slab[:, : 2 * inner * hidden] = gate_up.flatten(1)
    slab[:, first // size : first // size + hidden * inner] = down.flatten(1)
    return gate_up, down, slab.view(torch.uint8)


def route(ids: list[int], count: int, device: str) -> tuple[LayerWork, dict[int, int]]:
    """What `acquire` would leave behind: every expert that is asked for in some slot."""
    needed = sorted(set(ids) - {-1})
    slots = dict(zip(needed, torch.randperm(SLOTS)[: len(needed)].tolist(), strict=True))
    tables = plain.Tables(
        slot_of=[slots.get(e, -1) for e in range(count)],
        owner=[-1] * SLOTS, source=[], admit=[], victims=[], ring=0, experts=count,
    )  # fmt: skip
    found = plain.acquire(0, ids, tables)
    work = LayerWork.empty(count, len(ids), device)
    work.n_groups.fill_(len(found.group_slot))
    work.group_slot.fill_(1 << 30)  # an address out of bounds for whoever reads past n_groups
    work.group_lo.fill_(1 << 30)
    work.group_slot[: len(needed)] = torch.tensor(found.group_slot, dtype=torch.int32)
    work.group_lo[: len(needed) + 1] = torch.tensor(found.group_lo, dtype=torch.int32)
    work.order.copy_(torch.tensor(found.order, dtype=torch.int32))
    return work, slots


def make(
    ids: list[int], count: int, hidden: int, inner: int, dtype: torch.dtype, device: str
) -> Layer:
    work, slots = route(ids, count, device)
    return Layer(*blobs(hidden, inner, dtype, device), work, slots, ids)


IDS = {
    "one row": (1, 6, [4, 0]),
    "shared": (3, 6, [4, 0, 0, 5, 4, 5]),
    "padded": (3, 6, [1, 3, -1, -1, -1, -1]),
    "nobody": (1, 6, [-1, -1]),
    "more than a tile": (19, 1, [0] * 19),
    "many": (20, 2, [1, 0, *[0, 1] * 17, -1, -1, 1, 0]),
}
COMBINATIONS = [
    ("one row", None),
    ("one row", Shape(0, 64, 2048, 4)),
    ("one row", Shape(16, 64, 64, 4, 3)),
    ("shared", Shape(16, 32, 32, 4, 2)),
    ("padded", Shape(16, 64, 64, 4, 3)),
    ("padded", Shape(0, 64, 32, 2)),
    ("nobody", None),
    ("nobody", Shape(16, 64, 64, 4, 3)),
    ("more than a tile", Shape(16, 64, 32, 4, 2)),
    ("shared", Shape(0, 64, 64, 2)),
    ("many", Shape(32, 64, 64, 4, 3)),
]


@pytest.mark.parametrize(("case", "shape"), COMBINATIONS, ids=str)
@pytest.mark.parametrize("size", [(96, 40)])
def test_up_and_down(
    device: str,
    dtype: torch.dtype,
    near: float,
    size: tuple[int, int],
    case: str,
    shape: Shape | None,
) -> None:
    rows, count, ids = IDS[case]
    k = len(ids) // rows
    layer = make(ids, count, *size, dtype, device)
    x = torch.randn(rows, size[0], device=device).to(dtype)
    y = torch.full((len(ids), size[1]), torch.nan, dtype=dtype, device=device)
    experts.expert_up(x, layer.work, layer.slab, k, y=y, shape=shape)
    expected = layer.up(x, k)
    torch.testing.assert_close(y, expected, rtol=2 * near, atol=2 * near, equal_nan=True)
    for out in (dtype, torch.float32):
        z = torch.full((len(ids), size[0]), torch.nan, dtype=out, device=device)
        experts.expert_down(expected, layer.work, layer.slab, z=z, shape=shape)
        exact = layer.out(expected)
        close = max(near if out == dtype else 0.0, 2e-5)  # tensor cores cut sums off
        torch.testing.assert_close(z.float(), exact, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("size", [(160, 96), (48, 24)])
def test_other_sizes(device: str, dtype: torch.dtype, near: float, size: tuple[int, int]) -> None:
    test_up_and_down(device, dtype, near, size, "shared", Shape(0, 32, 128, 4))
    test_up_and_down(device, dtype, near, size, "one row", Shape(16, 32, 64, 4, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too slow for the interpreter")
@pytest.mark.parametrize(("rows", "count", "k"), [(1, 9, 8), (4, 9, 8), (64, 9, 8)])
@pytest.mark.parametrize("size", [(2048, 768), (2048, 1408), (2880, 1000)])
def test_real_sizes(
    device: str,
    dtype: torch.dtype,
    near: float,
    size: tuple[int, int],
    rows: int,
    count: int,
    k: int,
) -> None:
    ids = torch.stack([torch.randperm(count)[:k] for _ in range(rows)]).view(-1).tolist()
    layer = make(ids, count, *size, dtype, device)
    x = torch.randn(rows, size[0], device=device).to(dtype)
    y = torch.full((len(ids), size[1]), torch.nan, dtype=dtype, device=device)
    experts.expert_up(x, layer.work, layer.slab, k, y=y)
    near = max(near, 1e-5) * 2
    torch.testing.assert_close(y, layer.up(x, k), rtol=near, atol=near)
    z = torch.full((len(ids), size[0]), torch.nan, dtype=dtype, device=device)
    experts.expert_down(y, layer.work, layer.slab, z=z)
    torch.testing.assert_close(z.float(), layer.out(y), rtol=near, atol=near)


def test_a_row_alone_and_in_company(device: str) -> None:
    """The same kernel gives the same row whoever shares its expert."""
    shape = Shape(16, 16, 32, 4, 2)
    alone = make([3], 6, 96, 40, torch.float32, device)
    x = torch.randn(5, 96, device=device)
    y = torch.empty(1, 40, device=device)
    experts.expert_up(x[:1].clone(), alone.work, alone.slab, 1, y=y, shape=shape)
    work, slots = route([3] * 5, 6, device)
    slab = alone.slab.clone()
    slab[slots[3]] = alone.slab[alone.slots[3]]
    crowd = torch.empty(5, 40, device=device)
    experts.expert_up(x, work, slab, 1, y=crowd, shape=shape)
    torch.testing.assert_close(crowd[0], y[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [
        (2048, 2048, 2048),
        (4096, 2048, 2048),
        (768, 2048, 256),
        (1408, 2048, 512),
        (2880, 2048, 1024),
        (96, 128, 32),
        (24, 2048, 32),
        (24, 16, 16),
    ],
)
def test_fitting_columns(size: int, most: int, expected: int) -> None:
    assert experts.fitting_columns(size, most) == expected
