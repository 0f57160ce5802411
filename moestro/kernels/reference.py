"""The plain torch meaning of every op, and what a machine without a GPU runs.

Owns: what each op computes, in which order and dtype; faster candidates are tested against this.
Shapes: T tokens, B sequences, h query heads, g kv heads, d head dimension, E experts, k chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; statistics in float32, weight applied after
    rounding to the input's dtype (arXiv 1910.07467, order as in transformers' Llama)."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over d with one weight row per head: x [T, heads, d], weight [heads, d]."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rope_tables(
    positions: torch.Tensor, inverse: torch.Tensor, magnitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sign-folded sin, [T, 1, d], times `magnitude`: the first half of sin is negated, so
    that rotation is x * cos + roll(x, d / 2) * sin (half-split layout of arXiv 2104.09864 as Llama
    lays it out)."""
    angles = positions.to(torch.float32)[:, None] * inverse[None, :]
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, d] by the tables of `rope_tables`. When these have fewer dimensions, the
    first ones are rotated and the others stay."""
    turned = cos.shape[-1]
    if turned == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(turned // 2, -1), sin)
    return torch.cat((rope(x[..., :turned], cos, sin), x[..., turned:]), -1)


def softmax_topk(
    logits: torch.Tensor, k: int, renormalize: bool, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router: softmax over all experts in float32, the k best, maybe scaled to sum 1, cast last.

    logits [T, E] -> weights [T, k] in `out`, ids [T, k] int64.
    """
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(out), ids


def topk_softmax(
    logits: torch.Tensor, k: int, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router: the k best logits, softmax in float32 over these alone, cast last."""
    best, ids = torch.topk(logits.float(), k, -1)
    return torch.softmax(best, -1).to(out), ids


def biased_topk(
    scores: torch.Tensor, bias: torch.Tensor, k: int, groups: int, kept: int
) -> torch.Tensor:
    """The k experts [T, k] with the best scores [T, E] + bias [E], out of the `kept` best groups of
    equal size, where a group counts as much as its two best experts."""
    choice = scores + bias.float()
    if groups > 1:
        grouped = choice.view(len(choice), groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(kept, -1).indices
        out = torch.ones(best.shape[0], groups, dtype=torch.bool, device=best.device)
        choice = grouped.masked_fill(out.scatter(-1, best, False)[..., None], -torch.inf).flatten(1)
    return choice.topk(k, -1).indices


def grouped_softmax(
    logits: torch.Tensor, k: int, groups: int, kept: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router: softmax over all experts in float32, the k best out of the `kept` best groups of
    equal size, where a group counts as much as its best expert.

    logits [T, E] -> weights [T, k] float32, ids [T, k] int64.
    """
    scores = torch.softmax(logits, -1, dtype=torch.float32)
    if groups > 1:
        grouped = scores.view(len(scores), groups, -1)
        best = grouped.amax(-1).topk(kept, -1).indices
        out = torch.ones(best.shape[0], groups, dtype=torch.bool, device=best.device)
        scores = grouped.masked_fill(out.scatter(-1, best, False)[..., None], 0.0).flatten(1)
    return torch.topk(scores, k, -1)


def sparse_mixer(
    logits: torch.Tensor, jitter: float, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router: the two best experts. The weight of each is its softmax over those logits that are
    nearer to it than 2 * jitter of the larger magnitude (arXiv 2409.12136, at inference), the
    first one taken out before the second is weighed."""
    weights, ids, left = [], [], logits
    for _ in range(2):
        best, chosen = left.max(-1, keepdim=True)
        distant = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        near = left.masked_fill(distant, -torch.inf)
        weights.append(torch.softmax(near, -1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(weights, -1).to(out), torch.cat(ids, -1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2I] = [gate | up] (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1) for gate_up [T, 2I] = [gate | up], gate at most
    `limit` and up between -limit and limit before (arXiv 2508.10925)."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up + 1)


def sink_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention with one more score a head, which takes its share and stands for no token (arXiv
    2309.17453; as a learned number in arXiv 2508.10925).

    q [B, g, r, T, d], where r heads share each of g kv heads; keys, values [B, g, S, d]; visible
    bool [B or 1, 1, 1, T or 1, S]; sinks [g * r]. Returns [B, g, r, T, d]; softmax in float32.
    """
    groups, share = q.shape[1:3]
    scores = torch.matmul(q, keys.mT[:, :, None]).float().mul_(scale)
    scores.masked_fill_(~visible, -torch.inf)
    sink = sinks.float().view(groups, share, 1, 1)
    most = torch.maximum(scores.amax(-1, keepdim=True), sink)
    scores = scores.sub_(most).exp_()
    scores /= scores.sum(-1, keepdim=True) + (sink - most).exp()
    return torch.matmul(scores.to(values.dtype), values[:, :, None])


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query a sequence over its own KV.

    q [B, h, d]; kv [B, S, 2, g, d]; visible bool [B, 1, 1, S], True where a position is seen; sinks
    [h] as in `sink_attention`. Returns [B, h * d]. The h / g queries that share a kv head are the
    rows of one small matrix.
    """
    batch, heads, dim = q.shape
    kv_heads = kv.shape[3]
    keys, values = kv.select(2, 0).transpose(1, 2), kv.select(2, 1).transpose(1, 2)
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    if sinks is not None:
        mask = visible[:, :, None]
        out = sink_attention(grouped[..., None, :], keys, values, mask, sinks, scale)
        return out.reshape(batch, heads * dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale)
    return out.reshape(batch, heads * dim)


def sweep_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of queries at positions start, start + 1, ... over all keys from position 0.

    q [T, h, d]; keys, values [S, g, d] with S >= start + T; sinks [h] as in `sink_attention`.
    Returns [T, h * d].
    """
    rows = q.shape[0]
    end = start + rows
    first = 0 if window is None else max(0, start - window + 1)
    keys, values = keys[first:end], values[first:end]
    at = torch.arange(start, end, device=q.device)[:, None]
    seen = torch.arange(first, end, device=q.device)[None, :]
    mask = seen <= at
    if window is not None:
        mask &= seen > at - window
    if sinks is not None:
        kv_heads, dim = keys.shape[1:]
        grouped = q.transpose(0, 1).reshape(1, kv_heads, -1, rows, dim)
        keys, values = (t.transpose(0, 1)[None] for t in (keys, values))
        out = sink_attention(grouped, keys, values, mask, sinks, scale)
        return out.flatten(0, 2).transpose(0, 1).reshape(rows, -1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1).reshape(rows, -1)


def latent_attention(
    q: torch.Tensor, latents: torch.Tensor, visible: torch.Tensor, scale: float, rank: int
) -> torch.Tensor:
    """Attention of all heads over one vector a token, which is its key and, with its first `rank`
    elements, its value (arXiv 2405.04434, with the projections up from it absorbed).

    q [B, T, h, d]; latents [B, S, d]; visible bool [B, T, 1, S]. Returns [B, T, h, rank]. Queries
    of all heads are the rows of one matrix, and a whole vector is the value, so that the kernel
    for keys and values of the same width serves.
    """
    batch, rows, heads, dim = q.shape
    mask = visible.expand(-1, -1, heads, -1).reshape(batch, 1, rows * heads, -1)
    shared = latents[:, None]
    flat = q.reshape(batch, 1, rows * heads, dim)
    out = F.scaled_dot_product_attention(flat, shared, shared, attn_mask=mask, scale=scale)
    return out.view(batch, rows, heads, dim)[..., :rank]


def grouped_experts(
    rows: torch.Tensor,
    sizes: list[int],
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    gating: Callable[[torch.Tensor], torch.Tensor] = swiglu,
    biases: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Gated MLP of several experts: rows [R, H] sorted by expert, `sizes` rows for each.

    gate_up[i] [H, 2I] and down[i] [I, H], transposed views of the stored matrices, belong to the
    i-th group, as do biases[i], [2I] and [H]. Returns [R, H].
    """
    wide = rows.new_empty(rows.shape[0], gate_up[0].shape[1])
    _each_mm(rows, sizes, gate_up, wide)
    if biases is not None:
        _each_add(wide, sizes, [one for one, _ in biases])
    inner = gating(wide)
    result = torch.empty_like(rows)
    _each_mm(inner, sizes, down, result)
    if biases is not None:
        _each_add(result, sizes, [one for _, one in biases])
    return result


def _each_add(rows: torch.Tensor, sizes: list[int], biases: Sequence[torch.Tensor]) -> None:
    for part, bias in zip(rows.split_with_sizes(sizes), biases, strict=True):
        part.add_(bias)


def _each_mm(
    rows: torch.Tensor, sizes: list[int], weights: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    parts = zip(rows.split_with_sizes(sizes), weights, out.split_with_sizes(sizes), strict=True)
    for x, weight, y in parts:
        torch.mm(x, weight, out=y)
