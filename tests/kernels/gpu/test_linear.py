"""Products of a weight and few rows against torch."""

from __future__ import annotations

import pytest
import torch

from moestro.kernels.gpu.linear import Shape, choose, linear, serves

# Router, a short and an odd one, one whose columns fit no power of two.
SIZES = [(128, 256), (6, 96), (70, 200), (64, 1000)]
SHAPES = [Shape(1, 1, 4096, 1), Shape(4, 2, 128, 4), Shape(8, 16, 64, 2, 3), Shape(16, 32, 128, 4, 2)]  # fmt: skip


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


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_the_product_of_torch(
    device: str, dtype: torch.dtype, near: float, rows: int, n: int, k: int
) -> None:
    found, expected = multiply(rows, n, k, dtype, device, shape=None, bias=n == 70)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_every_kind_of_launch(
    device: str, dtype: torch.dtype, near: float, shape: Shape, bias: bool
) -> None:
    found, expected = multiply(5, 70, 200, dtype, device, shape=shape, bias=bias)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


@pytest.mark.parametrize("rows", [1, 2, 16, 21])
def test_the_shapes_in_use(device: str, dtype: torch.dtype, near: float, rows: int) -> None:
    for n in (96, 520):
        found, expected = multiply(rows, n, 128, dtype, device, shape=None, bias=True)
        torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_the_same_launch_gives_the_same_bits(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 384, device=device).to(dtype)
    weight = torch.randn(130, 384, device=device).to(dtype)
    outs = [torch.full((4, 130), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    for out in outs:
        linear(x, weight, out=out)
    assert torch.equal(outs[0], outs[1])


def test_other_rows_do_not_matter(device: str, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 128, device=device).to(dtype)
    x = torch.randn(4, 128, device=device).to(dtype)
    first, second = (torch.empty(4, 40, dtype=dtype, device=device) for _ in range(2))
    linear(x, weight, out=first)
    x[1:] = torch.nan
    linear(x, weight, out=second)
    assert torch.equal(first[0], second[0])


def test_whoever_is_served_has_a_shape_that_reads_the_weight_once() -> None:
    for rows in range(1, 65):
        for n in (8, 128, 2048, 5120):
            if n > 512 and serves(rows, n, 2048):
                assert rows <= choose(rows, n, torch.bfloat16).tokens
    assert serves(1, 128, 2048)
    assert not serves(4096, 5120, 2048)
