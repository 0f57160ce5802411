"""Packed matrices against their description, one element at a time, and what quantising loses."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.kernels import formats
from moestro.kernels.formats import Code, Format
from moestro.kernels.packed import dequantize, quantize, view

FORMATS = [
    formats.FP8,
    formats.fp8(3, 5, "bfloat16"),
    formats.fp8(1, 0, "float16"),
    formats.fp8(0, 0, "float32"),
    formats.fp8(4, 8, "float8_e8m0fnu"),
    formats.INT4,
    formats.int4(16, "bfloat16", zeros=True),
    formats.int4(0, "float16", zeros=True),
    formats.MXFP4,
    formats.NVFP4,
]
WIDTHS = (32, 40, 64)  # whole groups and not
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.nan if byte & 127 == 127 else (-size if sign else size)


def scale(dtype: str, raw: bytes) -> float:
    match dtype:
        case "float32":
            return float(struct.unpack("<f", raw)[0])
        case "float16":
            return float(struct.unpack("<e", raw)[0])
        case "bfloat16":
            return float(struct.unpack("<f", b"\0\0" + raw)[0])
        case "float8_e8m0fnu":
            return math.nan if raw[0] == 255 else 2.0 ** (raw[0] - 127)
    return e4m3(raw[0])


def literally(
    form: Format, data: bytes, n: int, k: int, stack: int, row: int, column: int
) -> float:
    """One element, read from the bytes as the module describes them."""
    fields = {field.name: field for field in form.fields(n, k, stack)}
    matrix, inner = divmod(row, n)
    down, across = form.grid(n, k)
    block = inner // (form.rows or n), column // (form.columns or k)

    def item(name: str, at: int, size: int) -> bytes:
        start = fields[name].offset + at * size
        return data[start : start + size]

    size = formats.FIELD_BYTES[form.scale]
    factor = scale(form.scale, item("scales", (matrix * down + block[0]) * across + block[1], size))
    if form.factor:
        factor *= scale("float32", item("factor", matrix, 4))
    if form.code is Code.E4M3:
        return e4m3(item("codes", row * k + column, 1)[0]) * factor
    code = item("codes", (row * k + column) // 2, 1)[0] >> 4 * (column % 2) & 15
    if form.code is Code.E2M1:
        return E2M1[code & 7] * (-1 if code & 8 else 1) * factor
    zero = 8
    if form.zeros:
        zero = item("zeros", row // 2 * across + block[1], 1)[0] >> 4 * (row % 2) & 15
    return (code - zero) * factor


@given(
    form=st.sampled_from(FORMATS), n=st.integers(1, 5), k=st.sampled_from(WIDTHS),
    stack=st.integers(1, 2), seed=st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_bytes_mean_what_the_description_says(
    form: Format, n: int, k: int, stack: int, seed: int
) -> None:
    n = 2 * n
    draw = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (form.nbytes(n, k, stack),), dtype=torch.uint8, generator=draw)
    for field in form.fields(n, k, stack):
        if field.dtype in ("float32", "bfloat16"):  # random bytes are too near its ends
            view(data, field).copy_(torch.randn(field.shape, generator=draw))
    raw = bytes(data.tolist())
    found = dequantize(form, data, n, k, torch.float64, stack=stack)
    for row, column in torch.stack((
        torch.randint(stack * n, (24,), generator=draw), torch.randint(k, (24,), generator=draw)
    ), 1).tolist():  # fmt: skip
        want = literally(form, raw, n, k, stack, row, column)
        want = torch.tensor(want, dtype=torch.float64).float().item()  # UE8M0 goes beyond float32
        assert found[row, column].item() == pytest.approx(want, rel=1e-6, nan_ok=True)


# Most that an element may move, as a share of the largest of its group: half of the widest gap
# between codes, or what is cut off at the top.
LOSS = {formats.MXFP4: 1 / 4, formats.NVFP4: 1 / 4, formats.INT4: 1 / 8, formats.FP8: 16 / 448}


@given(
    form=st.sampled_from(list(LOSS)), n=st.integers(1, 4), k=st.sampled_from(WIDTHS),
    stack=st.integers(1, 2),
    seed=st.integers(0, 1 << 30), size=st.floats(1e-3, 100.0),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_what_quantising_loses(
    form: Format, n: int, k: int, stack: int, seed: int, size: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(stack * n, k, generator=draw) * size
    weight[0] = 0.0
    data = quantize(form, weight, stack=stack)
    found = dequantize(form, data, n, k, torch.float32, stack=stack)
    assert (found[0] == 0).all()
    most = weight.abs().view(stack, -1).amax(1).repeat_interleave(n)[:, None].expand(-1, k)
    if form is not formats.FP8:
        groups = weight.abs().split(form.columns, 1)
        most = torch.cat([one.amax(1, keepdim=True).expand(one.shape) for one in groups], 1)
    assert ((found - weight).abs() <= 1.01 * LOSS[form] * most).all()
    if form in (formats.FP8, formats.MXFP4):  # scales of the others are rounded themselves
        again = quantize(form, found, stack=stack)
        assert torch.equal(dequantize(form, again, n, k, torch.float32, stack=stack), found)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_fields_are_aligned_and_apart(form: Format) -> None:
    fields = form.fields(6, 96, 2)
    for before, after in pairwise(fields):
        assert after.offset % formats.ALIGN == 0
        assert after.offset >= before.offset + before.nbytes
    data = torch.zeros(form.nbytes(6, 96, 2), dtype=torch.uint8)
    assert [tuple(view(data, field).shape) for field in fields] == [f.shape for f in fields]


def test_what_does_not_fit() -> None:
    assert "bytes of two codes" in str(formats.MXFP4.lacks(4, 33))
    assert "two zero points" in str(formats.int4(16, "float16", zeros=True).lacks(3, 32))
    assert formats.FP8.lacks(3, 5) is None
