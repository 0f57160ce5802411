"""Sweep attention over a paged pool against the reference in float64."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton")

import torch

from moestro.kernels import reference
from moestro.kernels.gpu import attention_sweep as kernel

PAGE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(
    device: str,
    dtype: torch.dtype,
    rows: int,
    start: int,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 32,
    window: int | None = None,
    sinks: bool = False,
    tile: kernel.Tile | None = None,
) -> None:
    end, layer, nan = start + rows, 1, float("nan")
    pages = -(-end // PAGE)
    pool = torch.full((pages + 2, 2, PAGE, 2, kv_heads, dim), nan, dtype=dtype)
    table = torch.randperm(pages + 2)[:pages]
    kv = torch.randn(end, 2, kv_heads, dim).to(dtype)
    at = torch.arange(end)
    first = 0 if window is None else max(0, start - window + 1)
    pool[table[at // PAGE], layer, at % PAGE] = kv
    pool[table[at[:first] // PAGE], layer, at[:first] % PAGE] = nan
    table[: first // PAGE] = 2**30
    wide = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    scale = 1.0 / math.sqrt(dim)
    sink = 2 * torch.randn(heads).to(dtype) if sinks else None
    expected = reference.sweep_attention(
        wide[:, :heads].double(),
        kv[:, 0].double(),
        kv[:, 1].double(),
        start,
        window,
        scale,
        None if sink is None else sink.double(),
    )
    out = torch.full((rows, heads * dim), nan, dtype=dtype, device=device)
    kernel.sweep_attention(
        wide.to(device)[:, :heads],
        pool.to(device),
        layer,
        table.to(torch.int32).to(device),
        start,
        scale,
        window,
        out=out,
        sinks=None if sink is None else sink.to(device),
        tile=tile,
    )
    torch.testing.assert_close(
        out.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(("rows", "start"), [(1, 0), (70, 0), (1, 99), (64, 64), (33, 130)])
def test_from_any_position(device: str, dtype: torch.dtype, rows: int, start: int) -> None:
    check(device, dtype, rows, start)


@pytest.mark.parametrize("window", [1, 30, 65, 500])
@pytest.mark.parametrize(("rows", "start"), [(100, 0), (40, 100)])
def test_window(device: str, window: int, rows: int, start: int) -> None:
    check(device, torch.float32, rows, start, window=window)
    check(device, torch.float16, rows, start, window=window)


@pytest.mark.parametrize("window", [None, 30])
def test_sinks(device: str, dtype: torch.dtype, window: int | None) -> None:
    check(device, dtype, 40, 50, heads=4, kv_heads=2, window=window, sinks=True)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 3, 96), (8, 2, 128), (2, 2, 64)])
def test_head_shapes(device: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    check(device, dtype, 40, 50, heads=heads, kv_heads=kv_heads, dim=dim)


def test_head_of_256(device: str, dtype: torch.dtype) -> None:
    check(device, dtype, 20, 7, dim=256)


@pytest.mark.parametrize("tile", [kernel.Tile(128, 128, 8, 3), kernel.Tile(128, 64, 8, 3)])
@pytest.mark.parametrize("window", [None, 150])
def test_large_tiles(device: str, tile: kernel.Tile, window: int | None) -> None:
    check(device, torch.float16, 270, 133, dim=64, window=window, tile=tile)
