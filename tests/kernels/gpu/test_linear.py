"""Products of a weight and few rows against torch."""

from __future__ import annotations

import pytest
import torch

from moestro.kernels.gpu.linear import Shape, choose, linear, serves

# (rows, n, k), by the table for short weights and the one for long ones.
SIZES = [(1, 10, 96), (3, 10, 96), (16, 10, 96), (21, 10, 96), (1, 520, 200), (4, 520, 200)]
SHAPES = [
    Shape(1, 1, 4096, 1),
    Shape(4, 2, 128, 4),
    Shape(8, 16, 64, 2, 3),
    Shape(16, 32, 128, 4, 2),
]


def multiply(
    rows: int, n: int, k: int, dtype: torch.dtype, device: str, *, shape: Shape | None, bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel wrote into a poisoned output, and what it should have."""
    x = torch.randn(rows, k, device=device).to(dtype)
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    shift = torch.randn(n, device=device).to(dtype) if bias else None
    # Poisoned in front and behind as well: nobody may write there.
    room = torch.full((rows + 2, n), torch.nan, dtype=dtype, device=device)
    linear(x, weight, out=room[1:-1], bias=shift, shape=shape)
    assert room[0].isnan().all()
    assert room[-1].isnan().all()
    exact = x.double() @ weight.double().T
    return room[1:-1], (exact if shift is None else exact + shift.double()).to(dtype)


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
def test_the_product_of_torch(
    device: str, dtype: torch.dtype, near: float, rows: int, n: int, k: int
) -> None:
    found, expected = multiply(rows, n, k, dtype, device, shape=None, bias=rows == 3)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


@pytest.mark.parametrize(("rows", "n"), [(1, 10), (3, 60), (16, 10)])
def test_a_wide_weight(device: str, dtype: torch.dtype, rows: int, n: int) -> None:
    x = torch.randn(rows, 200, device=device).to(dtype)
    weight = torch.randn(n, 200, device=device) / 14
    out = torch.full((rows, n), torch.nan, device=device)
    linear(x, weight, out=out)
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(out, exact, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("rows", [8, 16, 21])
def test_rows_in_tiles(device: str, near: float, dtype: torch.dtype, rows: int) -> None:
    if dtype == torch.float32:
        pytest.skip("has no tiles")
    found, expected = multiply(rows, 520, 200, dtype, device, shape=None, bias=True)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_every_kind_of_launch(
    device: str, dtype: torch.dtype, near: float, shape: Shape, bias: bool
) -> None:
    found, expected = multiply(5, 22, 200, dtype, device, shape=shape, bias=bias)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_the_same_launch_gives_the_same_bits(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 384, device=device).to(dtype)
    weight = torch.randn(13, 384, device=device).to(dtype)
    outs = [torch.full((4, 13), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    for out in outs:
        linear(x, weight, out=out)
    assert torch.equal(outs[0], outs[1])


def test_other_rows_do_not_matter(device: str, dtype: torch.dtype) -> None:
    weight = torch.randn(9, 128, device=device).to(dtype)
    x = torch.randn(4, 128, device=device).to(dtype)
    first, second = (torch.empty(4, 9, dtype=dtype, device=device) for _ in range(2))
    linear(x, weight, out=first)
    x[1:] = torch.nan
    linear(x, weight, out=second)
    assert torch.equal(first[0], second[0])


def test_who_is_served() -> None:
    assert serves(1, 5120, 2048)
    assert serves(16, 128, 2048)
    assert not serves(8, 5120, 2048)
    assert not serves(4096, 128, 2048)
    assert not serves(1, 151936, 2048)
    assert serves(4, 5120, 2048, torch.float32)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_long_weights_that_are_served_are_read_once(kind: torch.dtype) -> None:
    for rows in range(1, 17):
        if serves(rows, 5120, 2048, kind):
            assert rows <= choose(rows, 5120, kind).tokens
