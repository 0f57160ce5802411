"""Multi-head latent attention (arXiv 2405.04434) over paged latent vectors.

Owns: projections, norms of the latent vectors, rotary embedding and the cache write of one layer.
Does not own: which blocks are used (the step says) or how attention is computed (`kernels`).

A decode step makes no head's keys or values: it absorbs the projections up to them. A query goes
through its head's way from latent vector to key, so that it meets the vectors themselves, and what
a head gives goes up to its value after. A sweep does so when it is short and much lies before it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from moestro.engine.batch import DecodeStep, Segment
from moestro.engine.models.spec import LatentSpec
from moestro.engine.pieces import Pieces
from moestro.engine.weights import LayerWeights
from moestro.kernels import reference as ops
from moestro.kernels.packed import linear
from moestro.kv_cache.storage import LayerKV


class LatentAttention:
    """One layer's attention."""

    reads_pages = False  # no kernel reads the pool itself

    def __init__(
        self, spec: LatentSpec, weights: LayerWeights, residual_scale: float = 1.0
    ) -> None:
        assert weights.k_up is not None and weights.v_up is not None
        self.spec = spec
        self.projected = spec.heads * spec.query + spec.entry  # width of what `project` gives
        self.mixed = spec.heads * spec.value  # width of what `mix` gives
        self._residual_scale = residual_scale
        self._weights = weights
        self._k_up, self._v_up = weights.k_up, weights.v_up
        # FLOPs from one latent vector to one head's key and value, or the other way round.
        self._up = 2 * spec.kv_rank * (spec.plain + spec.value)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, heads * query + kv_rank + rotated]: queries and the cache's entry,
        the last dimensions of each rotated."""
        spec, weights = self.spec, self._weights
        flat = linear(x, weights.qkv, weights.qkv_bias)
        sizes = [flat.shape[1] - spec.entry, spec.kv_rank, spec.rotated]
        queries, latent, key = flat.split_with_sizes(sizes, -1)
        if weights.q_up is not None:
            assert weights.q_norm is not None
            queries = linear(ops.rms_norm(queries, weights.q_norm, spec.eps), weights.q_up)
        assert weights.k_norm is not None
        heads = queries.view(-1, spec.heads, spec.query)
        turned = torch.cat((heads[..., spec.plain :], key[:, None]), 1)
        turned = ops.rope(turned, cos.to(x.dtype), sin.to(x.dtype))
        heads = torch.cat((heads[..., : spec.plain], turned[:, :-1]), -1)
        latent = ops.rms_norm(latent, weights.k_norm, spec.eps)
        return torch.cat((heads.flatten(1), latent, turned[:, -1]), -1)

    def decode(
        self, x: torch.Tensor, residual: torch.Tensor, step: DecodeStep, kv: LayerKV
    ) -> torch.Tensor:
        """One token a sequence: x [B, hidden] -> residual + attention, [B, hidden]."""
        spec = self.spec
        queries, entries = self._parts(self.project(x, step.cos, step.sin))
        kv.write(step.places, entries)
        q = self._to_latent(queries, slice(None))[:, None]
        found = q.new_empty(q.shape[0], spec.heads, spec.kv_rank)
        for group in step.groups:
            rows = slice(None) if group.rows is None else group.rows
            mixed = ops.latent_attention(
                q[rows], kv.gather(group.table), group.visible, spec.scale, spec.kv_rank
            )
            found[rows] = mixed[:, 0]
        return self.output(self._to_values(found, slice(None)).flatten(1), residual)

    def write(self, projected: torch.Tensor, segment: Segment, kv: LayerKV, lo: int) -> None:
        """Store the entries of projected rows lo, lo + 1, ... of a segment."""
        _, entries = self._parts(projected)
        kv.write(segment.tables[kv.group].places[lo : lo + len(entries)], entries)

    def mix(
        self,
        projected: torch.Tensor,
        segment: Segment,
        kv: LayerKV,
        pieces: Pieces,
        mixed: torch.Tensor,
    ) -> Iterator[None]:
        """Attention of a segment's projected rows, a piece at a time, into `mixed` [length,
        heads * value]. The entries of all of them are written."""
        spec = self.spec
        queries, entries = self._parts(projected)
        if segment.row.start:
            entries = kv.gather(segment.tables[kv.group].table)[: segment.end]
        result = mixed.view(segment.length, spec.heads, spec.value)
        expands = self._expands(segment.row.start, segment.length)
        width = (spec.query + spec.value) // 2 if expands else spec.entry
        # Absorbing a query is as much work as it is to see so many tokens.
        more = 0 if expands else self._up // (4 * spec.entry)
        count = pieces.heads(segment.end, spec.heads, width)
        for head in range(0, spec.heads, count):
            mine = slice(head, min(head + count, spec.heads))
            made = (yield from self._expand(entries, mine, pieces)) if expands else None
            lo = 0
            while lo < segment.length:
                start = segment.row.start + lo
                size = pieces.queries(start + more, mine.stop - head, width)
                rows = slice(lo, min(lo + size, segment.length))
                if made is None:
                    result[rows, mine] = self._absorbed(queries[rows], entries, start, mine)
                else:
                    q, (keys, values) = queries[rows, mine], made
                    found = ops.sweep_attention(q, keys, values, start, None, spec.scale)
                    result[rows, mine] = found.view(len(q), -1, spec.value)
                lo = rows.stop
                yield

    def output(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + out_proj(mixed), times the model's residual scale."""
        added = linear(mixed, self._weights.out, self._weights.out_bias)
        return torch.add(residual, added, alpha=self._residual_scale)

    def _expands(self, start: int, length: int) -> bool:
        """Whether keys and values of all tokens are less work than queries that meet latent
        vectors: they are made once for each token, and every product with them is smaller."""
        spec = self.spec
        products = length * (start + (length + 1) // 2)
        return start * self._up < products * (4 * spec.entry - 2 * (spec.query + spec.value))

    def _expand(
        self, entries: torch.Tensor, heads: slice, pieces: Pieces
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
        """Keys [S, n, query] and values [S, n, value] of n heads, of entries [S, ...], a piece at
        a time."""
        spec, count = self.spec, heads.stop - heads.start
        keys = entries.new_empty(len(entries), count, spec.query)
        values = entries.new_empty(len(entries), count, spec.value)
        size = pieces.items(count * self._up)
        for lo in range(0, len(entries), size):
            rows = slice(lo, lo + size)
            latent, turned = entries[rows].split_with_sizes([spec.kv_rank, spec.rotated], -1)
            plain = torch.matmul(latent, self._k_up[heads].transpose(1, 2)).transpose(0, 1)
            keys[rows] = torch.cat((plain, turned[:, None].expand(-1, count, -1)), -1)
            values[rows] = torch.matmul(latent, self._v_up[heads]).transpose(0, 1)
            yield
        return keys, values

    def _absorbed(
        self, queries: torch.Tensor, entries: torch.Tensor, start: int, heads: slice
    ) -> torch.Tensor:
        """Values [T, n, value] of n heads for queries [T, all heads, query] from `start` on."""
        spec, end = self.spec, start + len(queries)
        at = torch.arange(start, end)[:, None]
        visible = (torch.arange(end)[None] <= at)[None, :, None]
        q = self._to_latent(queries, heads)[None]
        found = ops.latent_attention(q, entries[None, :end], visible, spec.scale, spec.kv_rank)
        return self._to_values(found[0], heads)

    def _parts(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, heads, query] and entries [T, kv_rank + rotated]."""
        spec = self.spec
        sizes = [spec.heads * spec.query, spec.entry]
        queries, entries = projected.split_with_sizes(sizes, -1)
        return queries.view(len(queries), spec.heads, spec.query), entries

    def _to_latent(self, queries: torch.Tensor, heads: slice) -> torch.Tensor:
        """Queries [T, all heads, query] -> [T, n, kv_rank + rotated], as they meet entries."""
        sizes = [self.spec.plain, self.spec.rotated]
        plain, turned = queries[:, heads].split_with_sizes(sizes, -1)
        latent = torch.bmm(plain.transpose(0, 1), self._k_up[heads]).transpose(0, 1)
        return torch.cat((latent, turned), -1)

    def _to_values(self, mixed: torch.Tensor, heads: slice) -> torch.Tensor:
        """Mixed latent vectors [T, n, kv_rank] -> what n heads give, [T, n, value]."""
        return torch.bmm(mixed.transpose(0, 1), self._v_up[heads]).transpose(0, 1)
