"""The compiled CPU kernels against the reference, and what must not leak between rows."""

from __future__ import annotations

import math

import pytest
import torch

from moestro.kernels import native, registry
from moestro.kernels import reference as ops

BLOCK, LAYERS = 16, 3


@pytest.fixture(autouse=True)
def _compiled() -> None:
    reason = native.missing()
    if reason is not None:
        pytest.skip(f"native kernels: {reason}")


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _case(
    draw: torch.Generator, ends: list[int], g: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool [blocks, layers, block, 2, g, dim] and a table [rows, n] of rows of layer 0."""
    width = max(ends) // BLOCK + 1
    blocks = len(ends) * width + 3
    pool = torch.randn(blocks, LAYERS, BLOCK, 2, g, dim, generator=draw)
    table = torch.randperm(blocks, generator=draw)[: len(ends) * width].view(len(ends), width)
    return pool, table * LAYERS


@pytest.mark.parametrize(
    ("ends", "h", "g", "dim"),
    [
        ([0], 4, 4, 8),
        ([15, 16, 63, 64, 65, 130], 8, 2, 32),
        ([1, 700], 6, 3, 20),
        ([257, 3], 4, 1, 128),
    ],
)
def test_decode_attention(draw: torch.Generator, ends: list[int], h: int, g: int, dim: int) -> None:
    pool, table = _case(draw, ends, g, dim)
    last = torch.tensor(ends)
    first = torch.clamp(last - 100, min=0)
    q = torch.randn(len(ends), h, dim, generator=draw)
    for layer in range(LAYERS):
        got = _attend(q, pool, table, first, last, layer)
        kv = pool.view(-1, BLOCK, 2, g, dim)[table + layer].flatten(1, 2)
        at = torch.arange(kv.shape[1])[None]
        visible = (at >= first[:, None]) & (at <= last[:, None])
        expected = ops.decode_attention(q, kv, visible[:, None, None], dim**-0.5)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_attention_reads_nothing_outside_what_is_seen(draw: torch.Generator) -> None:
    pool, table = _case(draw, [70, 70], 2, 8)
    q, last = torch.randn(2, 4, 8, generator=draw), torch.tensor([70, 70])
    first = torch.tensor([5, 5])
    clean = _attend(q, pool, table, first, last, 1)
    kept = torch.zeros_like(pool, dtype=torch.bool)
    for line in table.tolist():
        for token in range(5, 71):
            kept[line[token // BLOCK] // LAYERS, 1, token % BLOCK] = True
    assert torch.equal(clean, _attend(q, pool.masked_fill(~kept, math.nan), table, first, last, 1))


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_a_nan_stays_in_its_row(draw: torch.Generator, where: str) -> None:
    pool, table = _case(draw, [40, 40], 1, 8)
    q, first, last = (
        torch.randn(2, 2, 8, generator=draw),
        torch.zeros(2).long(),
        torch.tensor([40, 40]),
    )
    clean = _attend(q, pool, table, first, last, 0)
    if where == "query":
        q[0, 0, 3] = math.nan
    else:
        pool[int(table[0, 1]) // LAYERS, 0, 5, 0 if where == "key" else 1] = math.nan
    got = _attend(q, pool, table, first, last, 0)
    assert got[0].isnan().any()
    assert torch.equal(got[1], clean[1])


def _attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    rows = pool.view(pool.shape[0] * LAYERS, -1)
    return native.decode_attention(
        q,
        rows,
        table,
        first,
        last,
        layer=layer,
        kv_heads=pool.shape[4],
        block_size=BLOCK,
        scale=q.shape[-1] ** -0.5,
    )


def test_it_serves_float32_on_the_cpu_only() -> None:
    assert registry.serves("decode_attention", "native", "cpu", torch.float32)
    name, why = registry.explain("cpu", torch.bfloat16)["decode_attention"]
    assert (name, why) == (
        "torch reference",
        "not flashinfer: it is for CUDA devices; not triton: it is for CUDA devices; "
        "not native: it computes in float32, not in torch.bfloat16",
    )
