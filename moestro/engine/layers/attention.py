"""Grouped-query attention over paged KV.

Owns: projections, query/key norms, rotary embedding and the KV write of one layer. Does not own:
which blocks are used (the step says) or how attention is computed (`kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moestro.engine.batch import DecodeStep, Paged, Segment
from moestro.engine.models.spec import AttentionSpec, QKNorm
from moestro.engine.pieces import Pieces
from moestro.engine.weights import LayerWeights
from moestro.kernels import native
from moestro.kernels import reference as ops
from moestro.kernels.packed import PackedRows, linear
from moestro.kv_cache.storage import LayerKV


class Attention:
    """One layer's attention."""

    def __init__(
        self, spec: AttentionSpec, weights: LayerWeights, eps: float, residual_scale: float = 1.0
    ) -> None:
        self.spec = spec
        self.reads_pages = not spec.sinks  # there is a kernel that reads the pool itself: `native`
        self._residual_scale = residual_scale
        self._weights = weights
        self._eps = eps
        self._out = None if isinstance(weights.out, PackedRows) else weights.out.t()
        self._rows = spec.heads + 2 * spec.kv_heads  # of the projection, each of head_dim
        self._rotated = spec.heads + spec.kv_heads  # rows of it that are rotated
        self.projected = self._rows * spec.head_dim  # width of what `project` gives
        self.mixed = spec.heads * spec.head_dim  # width of what `mix` gives
        self._head_norm: torch.Tensor | None = None
        if spec.qk_norm is QKNorm.HEAD:
            assert weights.q_norm is not None and weights.k_norm is not None
            rows = (weights.q_norm.expand(spec.heads, -1), weights.k_norm.expand(spec.kv_heads, -1))
            self._head_norm = torch.cat(rows).contiguous()

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim]: q and k rotated, v as it is."""
        spec = self.spec
        flat = linear(x, self._weights.qkv, self._weights.qkv_bias)
        if spec.qk_norm is QKNorm.FULL:
            flat = self._full_norm(flat)
        if spec.clip is not None:
            flat = flat.clamp_(-spec.clip, spec.clip)
        turned = self._heads(flat)[:, : self._rotated]
        mixed = turned
        if self._head_norm is not None:
            mixed = ops.rms_norm_heads(turned, self._head_norm, self._eps)
        turned.copy_(ops.rope(mixed, cos.to(x.dtype), sin.to(x.dtype)))
        return flat

    def decode(
        self, x: torch.Tensor, residual: torch.Tensor, step: DecodeStep, kv: LayerKV
    ) -> torch.Tensor:
        """One token a sequence: x [B, hidden] -> residual + attention, [B, hidden]."""
        spec = self.spec
        heads = self._heads(self.project(x, step.cos, step.sin))
        q, new = heads[:, : spec.heads], heads[:, spec.heads :]
        kv.write(step.places, new.view(-1, 2, spec.kv_heads, spec.head_dim))
        if step.paged is not None:
            mixed = self._paged(q, step.paged, kv)
        elif len(step.groups) == 1:
            group = step.groups[0]
            mixed = ops.decode_attention(
                q, kv.gather(group.table), group.visible, spec.scale, self._weights.sinks
            )
        else:
            mixed = q.new_empty(q.shape[0], spec.heads * spec.head_dim)
            for group in step.groups:
                assert group.rows is not None
                mixed[group.rows] = ops.decode_attention(
                    q[group.rows],
                    kv.gather(group.table),
                    group.visible,
                    spec.scale,
                    self._weights.sinks,
                )
        return self.output(mixed, residual)

    def _paged(self, q: torch.Tensor, paged: Paged, kv: LayerKV) -> torch.Tensor:
        return native.decode_attention(
            q,
            kv.rows,
            paged.table,
            paged.first,
            paged.last,
            layer=kv.layer,
            kv_heads=self.spec.kv_heads,
            block_size=kv.block_size,
            scale=self.spec.scale,
        )

    def write(self, projected: torch.Tensor, segment: Segment, kv: LayerKV, lo: int) -> None:
        """Store the KV of projected rows lo, lo + 1, ... of a segment."""
        spec, hi = self.spec, lo + projected.shape[0]
        new = self._heads(projected)[:, spec.heads :]
        places = segment.tables[kv.group].places[lo:hi]
        kv.write(places, new.view(-1, 2, spec.kv_heads, spec.head_dim))

    def mix(
        self,
        projected: torch.Tensor,
        segment: Segment,
        kv: LayerKV,
        pieces: Pieces,
        mixed: torch.Tensor,
    ) -> Iterator[None]:
        """Attention of a segment's projected rows, a piece at a time, into `mixed` [length,
        heads * head_dim]. The KV of all of them is written."""
        spec, heads = self.spec, self._heads(projected)
        keys, values, behind = self._keys_values(heads, segment, kv)
        share = spec.heads // spec.kv_heads
        result = mixed.view(segment.length, spec.heads, spec.head_dim)
        for first, last in self._head_groups(segment, pieces):
            mine = slice(first * share, last * share)
            own_keys, own_values = (t[:, first:last].contiguous() for t in (keys, values))
            sinks = None if self._weights.sinks is None else self._weights.sinks[mine]
            lo = 0
            while lo < segment.length:
                start = segment.row.start + lo
                hi = lo + pieces.queries(self._seen(start), mine.stop - mine.start, spec.head_dim)
                hi = min(hi, segment.length)
                found = ops.sweep_attention(
                    heads[lo:hi, mine],
                    own_keys,
                    own_values,
                    start - behind,
                    spec.window,
                    spec.scale,
                    sinks,
                )
                result[lo:hi, mine] = found.view(hi - lo, -1, spec.head_dim)
                lo = hi
                yield

    def _head_groups(self, segment: Segment, pieces: Pieces) -> list[tuple[int, int]]:
        """Ranges of kv heads that attend together: all for a short run. For a long one each by
        itself, so that its keys and values stay in the processor's cache from tile to tile."""
        spec = self.spec
        whole = pieces.queries(self._seen(segment.row.start), spec.heads, spec.head_dim)
        if segment.length <= whole:
            return [(0, spec.kv_heads)]
        return [(head, head + 1) for head in range(spec.kv_heads)]

    def _seen(self, position: int) -> int:
        """Tokens before `position` that attention there looks at."""
        window = self.spec.window
        return position if window is None else min(position, window - 1)

    def _keys_values(
        self, heads: torch.Tensor, segment: Segment, kv: LayerKV
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """All keys and values that a segment sees, [positions, kv_heads, head_dim], and the
        position of the first."""
        if segment.row.start == 0:
            keys, values = heads[:, self.spec.heads :].chunk(2, 1)
            return keys, values, 0
        part = segment.tables[kv.group]
        both = kv.gather(part.table)[: segment.end - part.first]
        return both[:, 0], both[:, 1], part.first

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.view(projected.shape[0], self._rows, self.spec.head_dim)

    def output(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + out_proj(mixed), times the model's residual scale."""
        scale = self._residual_scale
        biased = self._weights.out_bias is not None
        if biased or mixed.dtype != torch.float32 or self._out is None:
            added = linear(mixed, self._weights.out, self._weights.out_bias)
            return torch.add(residual, added, alpha=scale)
        return torch.addmm(residual, mixed, self._out, alpha=scale)

    def _full_norm(self, flat: torch.Tensor) -> torch.Tensor:
        spec, weights = self.spec, self._weights
        assert weights.q_norm is not None and weights.k_norm is not None
        q = spec.heads * spec.head_dim
        kv = spec.kv_heads * spec.head_dim
        normed_q = ops.rms_norm(flat[:, :q], weights.q_norm, self._eps)
        normed_k = ops.rms_norm(flat[:, q : q + kv], weights.k_norm, self._eps)
        return torch.cat((normed_q, normed_k, flat[:, q + kv :]), -1)
