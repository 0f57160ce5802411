"""The reference ops against the most literal reading of their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from moestro.kernels import reference as ops
from moestro.kernels import registry


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(draw: torch.Generator, dtype: torch.dtype) -> None:
    x = torch.randn(5, 24, generator=draw).to(dtype)
    weight = torch.randn(24, generator=draw).to(dtype)
    wide = x.double()
    expected = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()) * weight.double()
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-6).double(), expected, rtol=tolerance, atol=tolerance
    )
    heads = x.view(5, 3, 8)
    per_head = weight.view(3, 8)
    expected = torch.stack([ops.rms_norm(heads[:, h], per_head[h], 1e-6) for h in range(3)], 1)
    torch.testing.assert_close(ops.rms_norm_heads(heads, per_head, 1e-6), expected)


def test_rope_rotates_pairs_by_position(draw: torch.Generator) -> None:
    x = torch.randn(4, 2, 8, generator=draw)
    inverse = 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)
    positions = torch.tensor([0, 1, 7, 300])
    turned = ops.rope(x, *ops.rope_tables(positions, inverse))
    for t, position in enumerate(positions.tolist()):
        for i in range(4):
            angle = position * float(inverse[i])
            a, b = x[t, :, i], x[t, :, i + 4]
            first = a * math.cos(angle) - b * math.sin(angle)
            second = b * math.cos(angle) + a * math.sin(angle)
            torch.testing.assert_close(turned[t, :, i], first, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(turned[t, :, i + 4], second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_topk(draw: torch.Generator, renormalize: bool) -> None:
    logits = torch.randn(6, 8, generator=draw)
    weights, ids = ops.softmax_topk(logits, 3, renormalize, torch.float32)
    for row in range(6):
        p = torch.exp(logits[row]) / torch.exp(logits[row]).sum()
        best = sorted(range(8), key=lambda e: -float(p[e]))[:3]
        assert ids[row].tolist() == best
        expected = p[best] / p[best].sum() if renormalize else p[best]
        torch.testing.assert_close(weights[row], expected)


def test_topk_softmax(draw: torch.Generator) -> None:
    logits = torch.randn(6, 8, generator=draw)
    weights, ids = ops.topk_softmax(logits, 3, torch.float32)
    for row in range(6):
        best = sorted(range(8), key=lambda e: -float(logits[row, e]))[:3]
        assert ids[row].tolist() == best
        powers = torch.exp(logits[row, best])
        torch.testing.assert_close(weights[row], powers / powers.sum())


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (2, 1)])
def test_biased_topk(draw: torch.Generator, groups: int, kept: int) -> None:
    scores, bias = torch.rand(20, 8, generator=draw), torch.randn(8, generator=draw)
    ids = ops.biased_topk(scores, bias, 3, groups, kept)
    size, narrowed = 8 // groups, 0
    for row in range(20):
        choice = (scores[row] + bias).tolist()
        parts = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
        by_two = [sum(sorted((choice[e] for e in part), reverse=True)[:2]) for part in parts]
        good = sorted(range(groups), key=lambda g: -by_two[g])[:kept]
        allowed = [e for g in good for e in parts[g]]
        assert ids[row].tolist() == sorted(allowed, key=lambda e: -choice[e])[:3]
        narrowed += ids[row].tolist() != sorted(range(8), key=lambda e: -choice[e])[:3]
    assert (narrowed > 0) == (groups > 1)


def test_sparse_mixer() -> None:
    # Near 2.0 within a fifth of it: 1.7. Near 1.7, when 2.0 is out: 1.5 and 1.4.
    logits = torch.tensor([[1.4, 2.0, -3.0, 1.7, 1.5]])
    weights, ids = ops.sparse_mixer(logits, 0.1, torch.float32)
    assert ids.tolist() == [[1, 3]]
    first = 1 / (1 + math.exp(-0.3))
    second = 1 / (1 + math.exp(-0.2) + math.exp(-0.3))
    torch.testing.assert_close(weights, torch.tensor([[first, second]]))
    alone, _ = ops.sparse_mixer(logits, 0.01, torch.float32)
    assert alone.tolist() == [[1.0, 1.0]]


def test_rope_of_some_dimensions_leaves_the_others(draw: torch.Generator) -> None:
    x = torch.randn(3, 2, 10, generator=draw)
    tables = ops.rope_tables(torch.tensor([0, 2, 9]), torch.tensor([1.0, 0.1, 0.01]), 1.5)
    turned = ops.rope(x, *tables)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    plain = ops.rope_tables(torch.tensor([0, 2, 9]), torch.tensor([1.0, 0.1, 0.01]))
    torch.testing.assert_close(turned[..., :6], 1.5 * ops.rope(x[..., :6].contiguous(), *plain))


def naive_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: list[int],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [h, d], keys and values [S, g, d]: one query over the positions in `seen`; sinks [h]."""
    heads, dim = q.shape
    share = heads // keys.shape[1]
    out = []
    for head in range(heads):
        scores = torch.stack([q[head] @ keys[s, head // share] for s in seen]) / math.sqrt(dim)
        if sinks is not None:  # one more score, whose share nobody gets
            scores = torch.cat((scores, sinks[head : head + 1]))
        out.append(torch.softmax(scores, 0)[: len(seen)] @ values[seen, head // share])
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("sunk", [False, True])
def test_sweep_attention(draw: torch.Generator, window: int | None, start: int, sunk: bool) -> None:
    q = torch.randn(6, 4, 8, generator=draw)
    keys, values = torch.randn(2, 14, 2, 8, generator=draw)
    sinks = torch.tensor([3.0, -200.0, 0.5, 100.0]) if sunk else None
    got = ops.sweep_attention(q, keys, values, start, window, 8**-0.5, sinks)
    for t in range(6):
        last = start + t
        first = 0 if window is None else max(0, last - window + 1)
        expected = naive_attention(q[t], keys, values, list(range(first, last + 1)), sinks)
        torch.testing.assert_close(got[t], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sunk", [False, True])
def test_decode_attention_reads_only_what_is_visible(draw: torch.Generator, sunk: bool) -> None:
    q = torch.randn(3, 4, 8, generator=draw)
    kv = torch.randn(3, 10, 2, 2, 8, generator=draw)
    lengths = [1, 7, 10]
    visible = torch.arange(10)[None, :] < torch.tensor(lengths)[:, None]
    sinks = torch.tensor([3.0, -200.0, 0.5, 100.0]) if sunk else None
    got = ops.decode_attention(q, kv, visible[:, None, None], 8**-0.5, sinks)
    for b, length in enumerate(lengths):
        keys, values = kv[b, :, 0], kv[b, :, 1]
        expected = naive_attention(q[b], keys, values, list(range(length)), sinks)
        torch.testing.assert_close(got[b], expected, rtol=1e-4, atol=1e-5)


def test_grouped_experts(draw: torch.Generator) -> None:
    rows = torch.randn(7, 6, generator=draw)
    gate_up = [torch.randn(10, 6, generator=draw) for _ in range(3)]
    down = [torch.randn(6, 5, generator=draw) for _ in range(3)]
    sizes = [4, 1, 2]
    got = ops.grouped_experts(rows, sizes, [w.t() for w in gate_up], [w.t() for w in down])
    owner = [0] * 4 + [1] + [2] * 2
    for row, expert in enumerate(owner):
        gate, up = (gate_up[expert] @ rows[row]).chunk(2)
        expected = down[expert] @ (gate / (1 + torch.exp(-gate)) * up)
        torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-5)


def test_registry_names_the_reason_of_a_refusal() -> None:
    first = registry.Candidate("fast", lambda device, dtype: f"needs cuda, not {device}")
    last = registry.Candidate("plain", lambda device, dtype: None)
    assert registry.choose((first, last), "cpu", torch.float32) == (
        "plain",
        "not fast: needs cuda, not cpu",
    )
    assert set(registry.explain("cpu", torch.float32)) == set(registry.OPS)
