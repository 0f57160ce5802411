"""Norm, rotary embedding and KV write on the device against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from moestro.kernels import reference
from moestro.kernels.gpu import rotary

LAYERS, BLOCKS, SIZE = 3, 4, 16


@dataclass(frozen=True)
class Case:
    h: int
    g: int
    d: int
    turned: int
    norm: bool
    clip: float | None
    magnitude: float = 1.0


CASES = [
    Case(8, 2, 128, 128, True, None),
    Case(6, 3, 96, 96, True, 1.5),
    Case(4, 1, 64, 32, False, None),
    Case(3, 3, 16, 8, True, 0.75),
    Case(32, 4, 32, 32, False, 1.0),
    Case(3, 1, 16, 12, False, None, 1.19),
]


def expected(
    case: Case,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    inverse: torch.Tensor,
    norms: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, h, d] and kv [B, 2, g, d]."""
    flat = qkv if case.clip is None else qkv.clamp(-case.clip, case.clip)
    heads = flat.view(-1, case.h + 2 * case.g, case.d)
    mixed = heads[:, : case.h + case.g]
    if norms:
        rows = (norms[0].expand(case.h, -1), norms[1].expand(case.g, -1))
        mixed = reference.rms_norm_heads(mixed, torch.cat(rows), 1e-6)
    cos, sin = (t.to(qkv.dtype) for t in reference.rope_tables(positions, inverse, case.magnitude))
    first = reference.rope(mixed[..., : case.turned], cos, sin)
    turned = torch.cat((first, mixed[..., case.turned :]), -1)
    kv = torch.cat((turned[:, case.h :], heads[:, case.h + case.g :]), 1)
    return turned[:, : case.h], kv.view(-1, 2, case.g, case.d)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(device: str, dtype: torch.dtype, near: float, case: Case) -> None:
    count, layer = 5, 1
    qkv = torch.randn(count, (case.h + 2 * case.g) * case.d, device=device).to(dtype)
    positions = torch.tensor([0, 1, 7, 300, 2000], device=device)
    # Places in layer 0 of blocks 3, 0, 0 and 1; the last row but one is padding.
    places = torch.tensor([3 * LAYERS * SIZE + 5, 0, 15, -1, LAYERS * SIZE + 2], device=device)
    steps = torch.arange(0, case.turned, 2, device=device) / case.turned
    inverse = 1.0 / 1e4**steps
    norms = [torch.randn(case.d, device=device).to(dtype) for _ in range(2)] if case.norm else []
    pool = torch.full((BLOCKS, LAYERS, SIZE, 2, case.g, case.d), -7.0, dtype=dtype, device=device)
    q_out = torch.full((count, case.h, case.d), torch.nan, dtype=dtype, device=device)
    q_norm, k_norm = norms if case.norm else (None, None)
    rotary.qk_norm_rope_write(
        qkv, positions, places, inverse, pool, layer, case.h, case.g, case.d,
        q_norm, k_norm, 1e-6, case.clip, q_out=q_out, magnitude=case.magnitude,
    )  # fmt: skip

    q, kv = expected(case, qkv, positions, inverse, norms)
    # cos and sin of the libraries differ by a rounding, which the largest values carry along.
    near = max(near, 2e-5) * 4
    torch.testing.assert_close(q_out, q, rtol=near, atol=near)
    stored = pool.view(-1, 2, case.g, case.d)
    where = places + layer * SIZE
    kept = places >= 0
    torch.testing.assert_close(stored[where[kept]], kv[kept], rtol=near, atol=near)
    untouched = torch.ones(stored.shape[0], dtype=torch.bool, device=device)
    untouched[where[kept]] = False
    assert (stored[untouched] == -7).all()


def test_many_rows_take_the_wide_shape(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "SHAPES", ((8, 4, 2), *rotary.SHAPES[1:]))
    case = Case(2, 1, 16, 16, False, None)
    count = 20
    qkv = torch.randn(count, 4 * case.d, device=device)
    positions = torch.arange(count, device=device)
    inverse = 1.0 / 100.0 ** (torch.arange(0, 16, 2, device=device) / 16)
    blocks = -(-count // SIZE)
    pool = torch.full((blocks, 1, SIZE, 2, 1, 16), torch.nan, device=device)
    q_out = torch.full((count, 2, 16), torch.nan, device=device)
    rotary.qk_norm_rope_write(
        qkv, positions, positions, inverse, pool, 0, 2, 1, 16, None, None, 1e-6, None, q_out=q_out
    )
    q, kv = expected(case, qkv, positions, inverse, [])
    torch.testing.assert_close(q_out, q, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool.view(-1, 2, 1, 16)[:count], kv, rtol=1e-4, atol=1e-4)
