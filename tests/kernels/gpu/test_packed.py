"""The kernels of packed matrices against the same matrices dequantised."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from moestro.kernels import formats, reference
from moestro.kernels.formats import Format
from moestro.kernels.gpu import grouping, packed_experts, packed_linear, packed_sweep
from moestro.kernels.gpu.experts import Shape
from moestro.kernels.gpu.experts_sweep import Tiles, plan_tiles
from moestro.kernels.gpu.packed import Place
from moestro.kernels.packed import dequantize, quantize
from tests.kernels.gpu.test_experts import IDS, SLOTS, route

FORMATS = {
    "fp8": formats.fp8(32, 32, "float32"),
    "fp8-channel": formats.fp8(1, 0, "bfloat16"),
    "fp8-whole": formats.fp8(0, 0, "float16"),
    "int4": formats.int4(32, "float16", zeros=False),
    "int4-zeros": formats.int4(16, "bfloat16", zeros=True),
    "int4-row": formats.int4(0, "float16", zeros=True),
    "mxfp4": formats.MXFP4,
    "nvfp4": formats.NVFP4,
}


def blobs(
    form: Format, hidden: int, inner: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Place, Place]:
    """gate_up [SLOTS, 2I, H] and down [SLOTS, H, I] in float32, the slab and the two places."""
    first = Place(form, inner, hidden, 0, 2)
    start = form.nbytes(inner, hidden, 2)
    second = Place(form, hidden, inner, start)
    slab = torch.full((SLOTS, start + form.nbytes(hidden, inner)), 0xFF, dtype=torch.uint8)
    plain: list[list[torch.Tensor]] = [[], []]
    for blob in slab:
        for place, found in zip((first, second), plain, strict=True):
            n, k, stack = place.n, place.k, place.stack
            data = quantize(form, torch.randn(stack * n, k) / k**0.5, stack=stack)
            for field in form.fields(n, k, stack):
                if field.name == "zeros":  # quantising leaves them in the middle
                    span = slice(field.offset, field.offset + field.nbytes)
                    data[span] = torch.randint(0, 256, (field.nbytes,), dtype=torch.uint8)
            blob[place.start : place.start + len(data)] = data
            found.append(dequantize(form, data, n, k, torch.float32, stack=stack))
    gate_up, down = (torch.stack(found).to(device) for found in plain)
    return gate_up, down, slab.to(device), first, second


SHAPES = {
    "one row": (Shape(0, 32, 32, 4), Shape(0, 64, 2048, 2)),
    "padded": (Shape(16, 64, 32, 4, 2), Shape(16, 64, 64, 4, 3)),
}


def one_dtype(name: str) -> tuple[torch.dtype, float]:
    """Formats in turn in either dtype that the interpreter has, and how near results must be."""
    half = torch.bfloat16 if torch.cuda.is_available() else torch.float16
    narrow = list(FORMATS).index(name) % 3 == 1
    return (half, 4 * torch.finfo(half).eps) if narrow else (torch.float32, 2e-5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", SHAPES)
def test_up_and_down(device: str, name: str, case: str) -> None:
    hidden, inner = 96, 40  # not whole groups of 16 or 32
    dtype, close = one_dtype(name)
    rows, count, ids = IDS[case]
    k = len(ids) // rows
    shape = SHAPES[case][list(FORMATS).index(name) % 2]
    gate_up, down, slab, first, second = blobs(FORMATS[name], hidden, inner, device)
    work, slots = route(ids, count, device)
    x = torch.randn(rows, hidden, device=device).to(dtype)
    y = torch.full((len(ids), inner), torch.nan, dtype=dtype, device=device)
    packed_experts.expert_up(x, work, slab, k, first, y=y, shape=shape)
    want = torch.full((len(ids), inner), torch.nan, device=device)
    for at, expert in enumerate(ids):
        if expert >= 0:
            wide = gate_up[slots[expert]].to(dtype).float() @ x[at // k].float()
            want[at] = reference.swiglu(wide)
    torch.testing.assert_close(y.float(), want, rtol=close, atol=close, equal_nan=True)
    z = torch.full((len(ids), hidden), torch.nan, device=device)
    packed_experts.expert_down(y, work, slab, second, z=z, shape=shape)
    want = torch.full((len(ids), hidden), torch.nan, device=device)
    for at, expert in enumerate(ids):
        if expert >= 0:
            want[at] = down[slots[expert]].to(dtype).float() @ y[at].float()
    torch.testing.assert_close(z, want, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "rows"), [("fp8", 16), ("int4-zeros", 16), ("mxfp4", 32), ("nvfp4", 16)]
)
def test_sweep(device: str, name: str, rows: int) -> None:
    hidden, inner, k, experts = 96, 32, 2, 5
    dtype, close = one_dtype(name)
    gate_up, down, slab, first, second = blobs(FORMATS[name], hidden, inner, device)
    ids = torch.randint(experts, (23, k)).to(device)
    routes = grouping.Routes.empty(ids.numel(), experts, device)
    grouping.sort_routes(ids, experts, out=routes)
    groups = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    slots = torch.tensor([7, 0, 2], dtype=torch.int32, device=device)
    tiles = Tiles.empty(ids.numel(), 3, rows, device)
    plan_tiles(routes.offsets, groups, slots, out=tiles)
    x = torch.randn(len(ids), hidden, device=device).to(dtype)
    y = torch.full((ids.numel(), inner), torch.nan, dtype=dtype, device=device)
    z = torch.full((ids.numel(), hidden), torch.nan, device=device)
    packed_sweep.sweep_up(x, routes.order, tiles, slab, k, first, y=y)
    packed_sweep.sweep_down(y, routes.order, tiles, slab, second, z=z)
    slot = dict(zip(groups.tolist(), slots.tolist(), strict=True))
    want_y, want_z = torch.full_like(y.float(), torch.nan), torch.full_like(z, torch.nan)
    for at, expert in enumerate(ids.view(-1).tolist()):
        if expert in slot:
            wide = gate_up[slot[expert]].to(dtype).float() @ x[at // k].float()
            want_y[at] = reference.swiglu(wide)
            want_z[at] = down[slot[expert]].to(dtype).float() @ y[at].float()
    torch.testing.assert_close(y.float(), want_y, rtol=close, atol=close, equal_nan=True)
    torch.testing.assert_close(z, want_z, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("name", ["fp8-channel", "int4-zeros", "nvfp4"])
def test_dense_products(device: str, name: str) -> None:
    """Few rows, and the matrix unpacked in parts for many; into columns of a wider tensor."""
    n, k, form = 40, 96, FORMATS[name]
    dtype, close = one_dtype(name)
    data = quantize(form, torch.randn(n, k) / k**0.5).to(device)
    plain = dequantize(form, data, n, k, dtype)
    x, bias = (torch.randn(size, device=device).to(dtype) for size in ((19, k), (n,)))
    wide = torch.full((19, n + 3), torch.nan, dtype=dtype, device=device)
    place = Place(form, n, k)
    packed_linear.packed_linear(x, place, data, out=wide[:, 2 : n + 2], bias=bias)
    want = (x.float() @ plain.float().t() + bias.float()).to(dtype)
    torch.testing.assert_close(wide[:, 2 : n + 2], want, rtol=close, atol=close)
    assert wide[:, :2].isnan().all()
    assert wide[:, n + 2 :].isnan().all()
    part = torch.empty(n - 7, k, dtype=dtype, device=device)
    packed_linear.unpack(place, data, 7, n, out=part)
    torch.testing.assert_close(part, plain[7:], rtol=1e-6, atol=1e-6)
