"""Norms on the device against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moestro.kernels import reference
from moestro.kernels.gpu import norm

SHAPES = [(1, 2048), (3, 96), (5, 2880), (2, 16)]


KINDS = ["rms", "rms-wide", "layer", "layer-no-bias"]


def made(kind: str, size: int, device: str, dtype: torch.dtype) -> norm.Norm:
    weight, bias = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    centered = kind.startswith("layer")
    return norm.Norm(weight, 1e-5, centered, kind == "rms", bias if kind == "layer" else None)


def expected(x: torch.Tensor, by: norm.Norm) -> torch.Tensor:
    if by.centered:
        return F.layer_norm(x, (x.shape[-1],), by.weight, by.bias, by.eps)
    if not by.rounded:
        return reference.rms_norm(x.float(), by.weight.float(), by.eps).to(x.dtype)
    return reference.rms_norm(x, by.weight, by.eps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(
    device: str, shape: tuple[int, int], kind: str, dtype: torch.dtype, near: float
) -> None:
    x = (3 * torch.randn(shape, device=device) + 2).to(dtype)
    by = made(kind, shape[1], device, dtype)
    out = torch.full_like(x, torch.nan)
    norm.apply_norm(x, by, out=out)
    torch.testing.assert_close(out, expected(x, by), rtol=near, atol=near)


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_norm(
    device: str, shape: tuple[int, int], kind: str, scale: float, dtype: torch.dtype, near: float
) -> None:
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    by = made(kind, shape[1], device, dtype)
    total = torch.add(residual, x, alpha=scale)
    out = torch.full_like(x, torch.nan)
    norm.add_norm(x, residual, by, out=out, scale=scale)
    exact = {"rtol": 0, "atol": 0} if scale == 1.0 else {"rtol": near, "atol": near}
    torch.testing.assert_close(residual, total, **exact)
    torch.testing.assert_close(out, expected(residual, by), rtol=near, atol=near)


def test_a_small_row_is_lifted_by_eps_only(device: str) -> None:
    x = torch.full((1, 64), 1e-4, device=device)
    out = torch.empty_like(x)
    norm.apply_norm(x, norm.Norm(torch.ones(64, device=device), 1.0), out=out)
    torch.testing.assert_close(out, x)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_mix(device: str, kind: str) -> None:
    x = torch.randn(3, 96, device=device)
    by = made(kind, 96, device, torch.float32)
    alone, beside = torch.empty_like(x), torch.empty_like(x)
    norm.apply_norm(x, by, out=alone)
    x[1] = torch.nan
    norm.apply_norm(x, by, out=beside)
    assert torch.equal(alone[::2], beside[::2])
    assert beside[1].isnan().all()
