"""The gate of a dense MLP on the device against the reference."""

from __future__ import annotations

import pytest
import torch

from moestro.kernels import reference
from moestro.kernels.gpu.swiglu import swiglu


@pytest.mark.parametrize(("rows", "size"), [(1, 40), (3, 1500)])
def test_swiglu(device: str, dtype: torch.dtype, near: float, rows: int, size: int) -> None:
    wide = (2 * torch.randn(rows, 2 * size, device=device)).to(dtype)
    out = torch.full((rows, size), torch.nan, dtype=dtype, device=device)
    swiglu(wide, out=out)
    torch.testing.assert_close(out, reference.swiglu(wide), rtol=near, atol=near)
