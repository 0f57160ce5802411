"""Rows times a dense weight matrix, by whichever kernel is the faster one."""

from __future__ import annotations

import torch

from moestro.kernels.gpu.linear import linear, serves
from moestro.kernels.gpu.packed import Place
from moestro.kernels.gpu.packed_linear import packed_linear, unpack
from moestro.kernels.packed import PackedMatrix, PackedRows, Weight

# Rows of x up to which a packed weight is read as it is; and elements of it that are unpacked at a
# time for more rows.
FEW_ROWS = 64
ELEMENTS = 16 << 20


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [T, n] = x [T, k] weight^T [n, k] + bias. A float32 weight may meet x of another dtype;
    out is of the weight's. A packed one is of x's."""
    if isinstance(weight, PackedRows):
        first = 0
        for part in weight.parts:
            rows = slice(first, first + part.n)
            _packed(x, part, None if bias is None else bias[rows], out[:, rows])
            first = rows.stop
        return
    n, k = weight.shape
    if serves(len(x), n, k, weight.dtype):
        linear(x, weight, out=out, bias=bias)
        return
    torch.mm(x.to(weight.dtype), weight.t(), out=out)
    if bias is not None:
        out += bias


def _packed(
    x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    place = Place(weight.format, weight.n, weight.k)
    if len(x) <= FEW_ROWS:
        packed_linear(x, place, weight.data, out=out, bias=bias)
        return
    step = max(1, ELEMENTS // weight.k)
    plain = torch.empty(min(step, weight.n), weight.k, dtype=x.dtype, device=x.device)
    for lo in range(0, weight.n, step):
        hi = min(weight.n, lo + step)
        rows = plain[: hi - lo]
        unpack(place, weight.data, lo, hi, out=rows)
        torch.mm(x, rows.t(), out=out[:, lo:hi])
    if bias is not None:
        out += bias
