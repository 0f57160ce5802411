"""Split decode attention over a paged pool against attention in float64."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton")

import torch

from moestro.kernels import reference
from moestro.kernels.gpu import attention_decode as kernel

PAGE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    """A pool of NaN in which only the visible tokens of each row are numbers."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        self.sinks = 2 * torch.randn(heads, device=device).to(dtype) if sinks else None
        self.window, self.scale = window, 1.0 / math.sqrt(dim)
        self.layer, layers = 1, 3
        pages = max(1, -(-max(lengths) // PAGE))
        blocks = len(lengths) * pages + 1
        self.pool = torch.full(
            (blocks, layers, PAGE, 2, kv_heads, dim), float("nan"), dtype=dtype, device=device
        )
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.tables = torch.full((len(lengths), pages), 2**30, dtype=torch.int32, device=device)
        self.q = torch.randn(len(lengths), heads, dim, device=device).to(dtype)
        numbers = torch.randperm(blocks)
        self.expected = torch.zeros(len(lengths), heads * dim, dtype=torch.float64)
        for row, length in enumerate(lengths):
            if length:
                self.expected[row] = self._row(row, length, numbers[row * pages :])

    def _row(self, row: int, length: int, numbers: torch.Tensor) -> torch.Tensor:
        first = 0 if self.window is None else max(0, length - self.window)
        for page in range(first // PAGE, -(-length // PAGE)):
            self.tables[row, page] = numbers[page]
        at = torch.arange(first, length)
        kv = torch.randn(length - first, *self.pool.shape[3:]).to(self.pool.dtype)
        where = numbers[at // PAGE].to(self.pool.device), at.to(self.pool.device) % PAGE
        self.pool[where[0], self.layer, where[1]] = kv.to(self.pool.device)
        visible = torch.ones(1, 1, 1, length - first, dtype=torch.bool)
        sinks = None if self.sinks is None else self.sinks.cpu().double()
        return reference.decode_attention(
            self.q[row : row + 1].cpu().double(), kv.double()[None], visible, self.scale, sinks
        )[0]

    def run(self, splits: int) -> torch.Tensor:
        rows, heads, dim = self.q.shape
        floats = kernel.scratch_floats(rows, heads, dim, splits)
        nan = float("nan")
        out = torch.full((rows, heads * dim), nan, dtype=self.q.dtype, device=self.q.device)
        kernel.decode_attention(
            self.q,
            self.pool,
            self.layer,
            self.tables,
            self.lengths,
            self.scale,
            self.window,
            out=out,
            scratch=torch.full((floats,), nan, device=self.q.device),
            splits=splits,
            sinks=self.sinks,
        )
        return out

    def check(self, splits: int) -> None:
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(
            self.run(splits).cpu().double(), self.expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_of_any_length(device: str, dtype: torch.dtype, splits: int) -> None:
    Case(device, dtype, [1, 0, 16, 17, 131, 200], heads=8, kv_heads=2, dim=64).check(splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(device: str, dtype: torch.dtype, splits: int, window: int | None) -> None:
    Case(device, dtype, [1, 0, 17, 140], 6, 2, 32, window, sinks=True).check(splits)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 32), (6, 3, 96), (32, 1, 128)])
def test_head_shapes(device: str, heads: int, kv_heads: int, dim: int) -> None:
    Case(device, torch.float16, [70, 5], heads, kv_heads, dim).check(splits=2)


def test_head_of_256(device: str, dtype: torch.dtype) -> None:
    Case(device, dtype, [40], heads=2, kv_heads=1, dim=256).check(splits=2)


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
@pytest.mark.parametrize("splits", [1, 2])
def test_window_hides_what_is_older(device: str, window: int, splits: int) -> None:
    Case(device, torch.float32, [150, 3, 0, 64], 4, 2, 32, window).check(splits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_nan_of_a_row_shows_in_that_row_alone(device: str) -> None:
    case = Case(device, torch.float32, [100, 100], heads=2, kv_heads=1, dim=32)
    case.q[1, 0, 3] = float("nan")
    out = case.run(splits=2)
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1, :32]).all()


def test_same_bits_every_time(device: str) -> None:
    case = Case(device, torch.float16, [130, 77], heads=4, kv_heads=2, dim=64)
    assert torch.equal(case.run(splits=4), case.run(splits=4))


def test_splits_fill_the_machine_and_stay_in_bounds() -> None:
    assert kernel.choose_splits(1, 4, 132) == kernel.MOST_SPLITS
    assert kernel.choose_splits(8, 4, 132) == 16
    assert kernel.choose_splits(64, 4, 132) == 2
    assert kernel.choose_splits(4096, 8, 132) == 1
    assert kernel.choose_splits(1, 8, 1) == 1
