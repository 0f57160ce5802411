"""From a checkpoint's tensors to the weights of one layer's attention.

Owns: how projections are joined, and the order of their rows. Does not own: which layers there are
(`engine.weights`) or how the numbers get here (the `read` that is passed).
"""

from __future__ import annotations

from typing import TypedDict

import torch

from moestro.engine.models.rope import RopeSpec
from moestro.engine.models.spec import AttentionSpec, LatentSpec, ModelSpec, QKNorm
from moestro.engine.reading import Read, Shape, join_rows
from moestro.kernels.packed import Weight


class AttentionWeights(TypedDict):
    """The part of `LayerWeights` that is attention's, which says the shapes."""

    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    q_up: Weight | None
    k_up: torch.Tensor | None
    v_up: torch.Tensor | None
    out: Weight
    out_bias: torch.Tensor | None
    sinks: torch.Tensor | None


def attention_weights(spec: ModelSpec, index: int, read: Read) -> AttentionWeights:
    """Ask `read` for every tensor of layer `index`'s attention."""
    attention = spec.layers[index].attention
    if isinstance(attention, LatentSpec):
        return _latent(spec, attention, index, read)
    return _grouped(spec, attention, index, read)


def _grouped(spec: ModelSpec, attention: AttentionSpec, index: int, read: Read) -> AttentionWeights:
    names = spec.names
    q_norm, k_norm = _qk_norm_shapes(attention)
    out, q = names.out.format(l=index), attention.heads * attention.head_dim
    qkv, qkv_bias = _qkv(spec, attention, index, read)
    return AttentionWeights(
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=read(f"{names.q_norm.format(l=index)}.weight", q_norm) if q_norm else None,
        k_norm=read(f"{names.k_norm.format(l=index)}.weight", k_norm) if k_norm else None,
        q_up=None,
        k_up=None,
        v_up=None,
        out=read.matrix(f"{out}.weight", (spec.hidden, q)),
        out_bias=read(f"{out}.bias", (spec.hidden,)) if attention.out_bias else None,
        sinks=read(names.sinks.format(l=index), (attention.heads,)) if attention.sinks else None,
    )


def _qkv(
    spec: ModelSpec, attention: AttentionSpec, index: int, read: Read
) -> tuple[Weight, torch.Tensor | None]:
    """The projections to queries, keys and values as one, with its bias if there is one. Rows of a
    packed one cannot be reordered."""
    names = [name.format(l=index) for name in spec.names.qkv]
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    rows = (q, kv, kv) if len(names) == 3 else (q + 2 * kv,)

    def stack(suffix: str, *shape: int) -> torch.Tensor:
        parts = [read(f"{n}.{suffix}", (r, *shape)) for n, r in zip(names, rows, strict=True)]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return _half_split(whole, attention, spec.rope) if spec.rope.interleaved else whole

    if spec.rope.interleaved:
        weight: Weight = stack("weight", spec.hidden)
    else:
        shapes = zip(names, rows, strict=True)
        weight = join_rows([read.matrix(f"{n}.weight", (r, spec.hidden)) for n, r in shapes])
    return weight, stack("bias") if attention.qkv_bias else None


def _half_split(qkv: torch.Tensor, attention: AttentionSpec, rope: RopeSpec) -> torch.Tensor:
    """Rows [(heads + 2 * kv_heads) * head_dim, ...], reordered in each head of q and k: pairs 2i
    and 2i + 1 become i and i + dim / 2. Products of q and k are what they were."""
    assert attention.qk_norm is QKNorm.NONE, "its weights would have to be reordered too"
    rest = torch.arange(rope.dim, attention.head_dim, device=qkv.device)
    order = torch.cat((_halves(rope.dim, qkv.device), rest))
    heads = qkv.view(-1, attention.head_dim, *qkv.shape[1:])
    turned = attention.heads + attention.kv_heads
    return torch.cat((heads[:turned].index_select(1, order), heads[turned:])).flatten(0, 1)


def _halves(dim: int, device: torch.device) -> torch.Tensor:
    """Where each of `dim` rotated dimensions comes from, when pairs are neighbours."""
    even = torch.arange(0, dim, 2, device=device)
    return torch.cat((even, even + 1))


def _qk_norm_shapes(attention: AttentionSpec) -> tuple[Shape | None, Shape | None]:
    if attention.qk_norm is QKNorm.NONE:
        return None, None
    if attention.qk_norm is QKNorm.HEAD:
        return (attention.head_dim,), (attention.head_dim,)
    return (attention.heads * attention.head_dim,), (attention.kv_heads * attention.head_dim,)


def _latent(spec: ModelSpec, attention: LatentSpec, index: int, read: Read) -> AttentionWeights:
    names, hidden, rank = spec.names, spec.hidden, attention.kv_rank
    queries, q_rank = attention.heads * attention.query, attention.q_rank
    q_down, kv_down = (name.format(l=index) for name in names.qkv)  # or the whole way to queries
    q_up, kv_up = names.q_up.format(l=index), names.kv_up.format(l=index)
    q_norm, k_norm = names.q_norm.format(l=index), names.k_norm.format(l=index)
    out = names.out.format(l=index)

    def last_dims(rows: torch.Tensor, width: int) -> torch.Tensor:
        """Rows [n * width, ...] with the last dimensions of each `width` laid out in halves."""
        if not spec.rope.interleaved:
            return rows
        order = torch.arange(width, device=rows.device)
        order[width - attention.rotated :] = (
            width - attention.rotated + _halves(attention.rotated, rows.device)
        )
        return rows.view(-1, width, *rows.shape[1:]).index_select(1, order).flatten(0, 1)

    def from_hidden(suffix: str, *shape: int) -> torch.Tensor:
        keys = last_dims(read(f"{kv_down}.{suffix}", (attention.entry, *shape)), attention.entry)
        if q_rank is not None:
            return torch.cat((read(f"{q_down}.{suffix}", (q_rank, *shape)), keys))
        if suffix == "bias":  # the whole way to queries has none
            return torch.cat((keys.new_zeros(queries), keys))
        whole = read(f"{q_down}.{suffix}", (queries, *shape))
        return torch.cat((last_dims(whole, attention.query), keys))

    heads = attention.heads, attention.plain + attention.value, rank
    both = read(f"{kv_up}.weight", (heads[0] * heads[1], rank)).view(heads)
    up = None
    if q_rank is not None:
        up = last_dims(read(f"{q_up}.weight", (queries, q_rank)), attention.query)
    return AttentionWeights(
        qkv=from_hidden("weight", hidden),
        qkv_bias=from_hidden("bias") if attention.bias else None,
        q_norm=None if q_rank is None else read(f"{q_norm}.weight", (q_rank,)),
        k_norm=read(f"{k_norm}.weight", (rank,)),
        q_up=up,
        k_up=both[:, : attention.plain].contiguous(),
        v_up=both[:, attention.plain :].transpose(1, 2).contiguous(),
        out=read.matrix(f"{out}.weight", (hidden, attention.heads * attention.value)),
        out_bias=read(f"{out}.bias", (hidden,)) if attention.bias else None,
        sinks=None,
    )
