"""Biases and the clamped activation in every kernel of experts: plain or packed, few rows or many.

The kernels by themselves are tested in tests/kernels/gpu.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from moestro.engine.gpu.expert_kernels import ExpertKernels
from moestro.engine.models.activation import ClampedSwiGLU
from moestro.expert_cache.layout import ExpertLayout, gated_layout, packed_layout
from moestro.kernels import formats, reference
from moestro.kernels.gpu import grouping
from moestro.kernels.gpu.experts_sweep import Tiles, plan_tiles
from moestro.kernels.packed import dequantize, quantize
from tests.kernels.gpu.conftest import device, interpreter, seeded
from tests.kernels.gpu.test_experts import SLOTS, route

__all__ = ["device", "interpreter", "seeded"]  # fixtures

HIDDEN, INNER, EXPERTS, K = 64, 40, 4, 2
ACTIVATION = ClampedSwiGLU(alpha=1.7, limit=0.8)  # so low that numbers reach it
LAYOUTS = {
    "plain": gated_layout(HIDDEN, INNER, "float32", bias=True),
    "mxfp4": packed_layout(HIDDEN, INNER, "float32", formats.MXFP4, bias=True),
}


def fill(layout: ExpertLayout, device: str) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """A slab of random experts; for each slot gate_up [2I, H], down [H, I] and their biases."""
    slab = torch.full((SLOTS, layout.nbytes), 0xFF, dtype=torch.uint8)
    slots = []
    for blob in slab:
        found = []
        for name, n, k, stack in (("gate_up", INNER, HIDDEN, 2), ("down", HIDDEN, INNER, 1)):
            matrix = torch.randn(stack * n, k) / k**0.5
            data = matrix.flatten().view(torch.uint8)
            if layout.format is not None:
                data = quantize(layout.format, matrix, stack=stack)
                matrix = dequantize(layout.format, data, n, k, torch.float32, stack=stack)
            blob[layout.start(name) :][: len(data)] = data
            found.append(matrix.to(device))
        for name, n in (("gate_up_bias", 2 * INNER), ("down_bias", HIDDEN)):
            bias = torch.randn(n) / 2
            blob[layout.part(name).offset :][: 4 * n] = bias.view(torch.uint8)
            found.append(bias.to(device))
        slots.append(found)
    return slab.to(device), slots


def expected(x: torch.Tensor, ids: list[int], experts: dict[int, list[torch.Tensor]]) -> object:
    """z [P, H], by way of the reference."""
    z = torch.full((len(ids), HIDDEN), torch.nan, device=x.device)
    for at, expert in enumerate(ids):
        if expert in experts:
            gate_up, down, up_bias, down_bias = experts[expert]
            z[at] = reference.grouped_experts(
                x[at // K][None],
                [1],
                [gate_up.t()],
                [down.t()],
                lambda wide: reference.clamped_swiglu(wide, ACTIVATION.alpha, ACTIVATION.limit),
                [(up_bias, down_bias)],
            )[0]
    return z


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ids", [[1, 3], [0, 2, 3, 0, 0, 1, 3, 1, 2, 0]], ids=["row", "tile"])
def test_a_step(device: str, layout: str, ids: list[int]) -> None:
    slab, slots = fill(LAYOUTS[layout], device)
    work, slot_of = route(ids, EXPERTS, device)
    x = torch.randn(len(ids) // K, HIDDEN, device=device)
    y, z = (torch.full((len(ids), n), torch.nan, device=device) for n in (INNER, HIDDEN))
    ExpertKernels(LAYOUTS[layout], ACTIVATION).decode(x, work, slab, K, y, z)
    want = expected(x, ids, {expert: slots[slot] for expert, slot in slot_of.items()})
    torch.testing.assert_close(z, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sweep(device: str, layout: str) -> None:
    slab, slots = fill(LAYOUTS[layout], device)
    ids = torch.randint(EXPERTS, (19, K), device=device)
    routes = grouping.Routes.empty(ids.numel(), EXPERTS, device)
    grouping.sort_routes(ids, EXPERTS, out=routes)
    groups, places = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 3], [7, 2]))
    tiles = Tiles.empty(ids.numel(), 2, 16, device)
    plan_tiles(routes.offsets, groups, places, out=tiles)
    x = torch.randn(len(ids), HIDDEN, device=device)
    y, z = (torch.full((ids.numel(), n), torch.nan, device=device) for n in (INNER, HIDDEN))
    kernels = ExpertKernels(LAYOUTS[layout], ACTIVATION)
    kernels.sweep(x, routes.order, tiles, slab, K, y, z)
    want = expected(x, ids.view(-1).tolist(), {0: slots[7], 3: slots[2]})
    torch.testing.assert_close(z, want, rtol=2e-5, atol=2e-5, equal_nan=True)
