"""The weighted sum, the residual and the norm against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moestro.kernels import reference
from moestro.kernels.gpu.combine import Beside, combine
from moestro.kernels.gpu.norm import Norm


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("rows", "k", "size"), [(1, 8, 2048), (3, 2, 96), (5, 1, 40)])
def test_combine(
    device: str,
    dtype: torch.dtype,
    near: float,
    rows: int,
    k: int,
    size: int,
    norm: bool,
    wide: bool,
) -> None:
    z = torch.randn(rows * k, size, device=device).to(torch.float32 if wide else dtype)
    weights = torch.rand(rows, k, device=device).to(torch.float32 if wide else dtype)
    residual = torch.randn(rows, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    total = (z.double().view(rows, k, size) * weights.double()[..., None]).sum(1)
    expected = (residual.double() + total).to(dtype)
    out = torch.full_like(residual, torch.nan) if norm else None
    combine(z, weights, residual, Norm(weight, 1e-5) if norm else None, out=out)
    torch.testing.assert_close(residual, expected, rtol=near, atol=near)
    if out is not None:
        normed = reference.rms_norm(residual, weight, 1e-5)
        torch.testing.assert_close(out, normed, rtol=near, atol=near)


@pytest.mark.parametrize("gated", [True, False])
def test_a_shared_expert_a_multiplier_and_a_layer_norm(
    device: str, dtype: torch.dtype, near: float, gated: bool
) -> None:
    rows, k, size = 3, 2, 96
    z, added, residual = (
        torch.randn(n, size, device=device).to(dtype) for n in (rows * k, rows, rows)
    )
    weights, gate = (torch.randn(rows, n, device=device).to(dtype) for n in (k, 1))
    weight, bias = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    total = (z.double().view(rows, k, size) * weights.double()[..., None]).sum(1)
    total += added.double() * (torch.sigmoid(gate.double()) if gated else 1)
    expected = (residual.double() + 0.7 * total).to(dtype)
    out = torch.full_like(residual, torch.nan)
    beside = Beside(added, gate if gated else None)
    by = Norm(weight, 1e-5, centered=True, bias=bias)
    combine(z, weights, residual, by, out=out, beside=beside, scale=0.7)
    torch.testing.assert_close(residual, expected, rtol=near, atol=near)
    normed = F.layer_norm(residual, (size,), weight, bias, 1e-5)
    torch.testing.assert_close(out, normed, rtol=near, atol=near)


def test_routes_without_weight_are_not_read(device: str) -> None:
    z = torch.randn(4, 96, device=device)
    z[1:3] = torch.nan
    weights = torch.tensor([[0.5, 0.0], [0.0, 2.0]], device=device)
    residual = torch.zeros(2, 96, device=device)
    combine(z, weights, residual, None, out=None)
    torch.testing.assert_close(residual, torch.stack((0.5 * z[0], 2.0 * z[3])))


def test_a_poisoned_weight_shows(device: str) -> None:
    residual = torch.zeros(2, 16, device=device)
    weights = torch.tensor([[torch.nan], [1.0]], device=device)
    combine(torch.ones(2, 16, device=device), weights, residual, None, out=None)
    assert residual[0].isnan().all()
    assert (residual[1] == 1).all()
