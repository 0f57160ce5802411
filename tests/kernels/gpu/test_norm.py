"""RMSNorm on the device against the reference."""

from __future__ import annotations

import pytest
import torch

from moestro.kernels import reference
from moestro.kernels.gpu import norm

SHAPES = [(1, 2048), (3, 96), (5, 2880), (2, 16)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(device: str, shape: tuple[int, int], dtype: torch.dtype, near: float) -> None:
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    weight = torch.randn(shape[1], device=device).to(dtype)
    out = torch.full_like(x, torch.nan)
    norm.rms_norm(x, weight, 1e-5, out=out)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), rtol=near, atol=near)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(device: str, shape: tuple[int, int], dtype: torch.dtype, near: float) -> None:
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1], device=device).to(dtype)
    total = residual + x
    out = torch.full_like(x, torch.nan)
    norm.add_rms_norm(x, residual, weight, 1e-5, out=out)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    torch.testing.assert_close(out, reference.rms_norm(total, weight, 1e-5), rtol=near, atol=near)


def test_a_small_row_is_lifted_by_eps_only(device: str) -> None:
    x = torch.full((1, 64), 1e-4, device=device)
    out = torch.empty_like(x)
    norm.rms_norm(x, torch.ones(64, device=device), 1.0, out=out)
    torch.testing.assert_close(out, x)


def test_rows_do_not_mix(device: str) -> None:
    x = torch.randn(3, 96, device=device)
    weight = torch.randn(96, device=device)
    alone, beside = torch.empty_like(x), torch.empty_like(x)
    norm.rms_norm(x, weight, 1e-6, out=alone)
    x[1] = torch.nan
    norm.rms_norm(x, weight, 1e-6, out=beside)
    assert torch.equal(alone[::2], beside[::2])
    assert beside[1].isnan().all()
