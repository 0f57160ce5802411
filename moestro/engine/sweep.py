"""A sweep: prompt tokens travelling up the layers, a bounded piece of work at a time.

Owns: the state of one sweep between pieces. Between any two pieces the engine may run a decode
step, so nothing is leased while a sweep rests, and a dropped segment never writes KV again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moestro.engine.batch import Segment, build_segment, cat_rows
from moestro.engine.decoder import Decoder, DecoderLayer
from moestro.engine.experts import ExpertExecutor
from moestro.engine.models.spec import AttentionSpec
from moestro.kernels import reference as ops
from moestro.kv_cache.storage import KVStorage, LayerKV
from moestro.scheduler.plan import SweepPlan


@dataclass(frozen=True, slots=True)
class Pieces:
    """How many rows make one piece of each kind, from a number of FLOPs per piece."""

    flops: float
    hidden: int

    def rows(self, width: int) -> int:
        """Rows of a projection from `hidden` to `width`."""
        return max(16, int(self.flops / (2.0 * self.hidden * max(width, 1))))

    def queries(self, start: int, heads: int, head_dim: int) -> int:
        """Queries from position `start` on, each of which sees all keys up to its own: the n for
        which n * (start + n) products are one piece."""
        products = self.flops / (4.0 * heads * head_dim)
        return max(8, int((math.sqrt(start * start + 4.0 * products) - start) / 2.0))


class Sweep:
    """Runs one `SweepPlan`. Call `advance` until it says that it is finished."""

    def __init__(
        self,
        plan: SweepPlan,
        decoder: Decoder,
        kv: KVStorage,
        experts: ExpertExecutor,
        piece_flops: float,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._experts = experts
        self._pieces = Pieces(piece_flops, decoder.spec.hidden)
        self.segments = [
            build_segment(row, kv.block_size, kv.layers, decoder.rotary) for row in plan.rows
        ]
        self._x = decoder.embed(cat_rows([segment.tokens for segment in self.segments]))
        self._work = self._run()

    def advance(self) -> bool:
        """Do one piece; True when the sweep has reached the top."""
        return next(self._work, _DONE) is _DONE

    def drop(self, id: str) -> None:
        """This sequence left: its segment writes nothing from now on."""
        for segment in self.segments:
            if segment.row.id == id:
                segment.alive = False

    def top(self) -> list[tuple[Segment, torch.Tensor]]:
        """After the last piece: each live segment with its hidden rows [length, hidden]."""
        parts = self._x.split_with_sizes([segment.length for segment in self.segments])
        return [
            (segment, part)
            for segment, part in zip(self.segments, parts, strict=True)
            if segment.alive
        ]

    def _run(self) -> Iterator[None]:
        for index, layer in enumerate(self._decoder.layers):
            self._compact()
            if not self.segments:
                return
            yield from self._attention(layer, self._kv.view(index))
            yield from self._feed_forward(layer)

    def _compact(self) -> None:
        """Forget the rows of dropped segments."""
        if all(segment.alive for segment in self.segments):
            return
        kept = self.top()
        self.segments = [segment for segment, _ in kept]
        self._x = cat_rows([part for _, part in kept]) if kept else self._x[:0]

    def _attention(self, layer: DecoderLayer, kv: LayerKV) -> Iterator[None]:
        x = torch.empty_like(self._x)
        lo = 0
        for segment in self.segments:
            rows = slice(lo, lo + segment.length)
            yield from self._attend(layer, kv, segment, self._x[rows], x[rows])
            lo += segment.length
        self._x = x

    def _attend(
        self,
        layer: DecoderLayer,
        kv: LayerKV,
        segment: Segment,
        x: torch.Tensor,
        out: torch.Tensor,
    ) -> Iterator[None]:
        """One segment's attention, residual included, into `out`."""
        attention, spec = layer.attention, layer.attention.spec
        heads = x.new_empty(segment.length, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        size = self._pieces.rows((spec.heads + 2 * spec.kv_heads) * spec.head_dim)
        for lo in range(0, segment.length, size):
            hi = min(lo + size, segment.length)
            normed = layer.input_norm(x[lo:hi])
            heads[lo:hi] = attention.project(normed, segment.cos[lo:hi], segment.sin[lo:hi])
            if not segment.alive:
                out.zero_()
                return
            attention.write(heads[lo:hi], segment, kv, lo)
            yield
        if not segment.alive:
            out.zero_()
            return
        keys, values = self._keys_values(heads, segment, kv, spec.heads)
        mixed = x.new_empty(segment.length, spec.heads, spec.head_dim)
        for first, last in self._head_groups(segment, spec):
            yield from self._mix(heads, keys, values, segment, spec, (first, last), mixed)
        size = self._pieces.rows(spec.heads * spec.head_dim)
        for lo in range(0, segment.length, size):
            rows = slice(lo, lo + size)
            out[rows] = attention.output(mixed[rows].flatten(1), x[rows])
            yield

    def _head_groups(self, segment: Segment, spec: AttentionSpec) -> list[tuple[int, int]]:
        """Ranges of kv heads that attend together: all for a short run. For a long one each by
        itself, so that its keys and values stay in the processor's cache from tile to tile."""
        whole = self._pieces.queries(segment.row.start, spec.heads, spec.head_dim)
        if segment.length <= whole:
            return [(0, spec.kv_heads)]
        return [(head, head + 1) for head in range(spec.kv_heads)]

    def _mix(
        self,
        heads: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        segment: Segment,
        spec: AttentionSpec,
        group: tuple[int, int],
        mixed: torch.Tensor,
    ) -> Iterator[None]:
        """Attention of the heads of one group, a tile of queries at a time, into `mixed`."""
        share = spec.heads // spec.kv_heads
        mine = slice(group[0] * share, group[1] * share)
        keys, values = (t[:, group[0] : group[1]].contiguous() for t in (keys, values))
        lo = 0
        while lo < segment.length:
            start = segment.row.start + lo
            count = self._pieces.queries(start, mine.stop - mine.start, spec.head_dim)
            hi = min(lo + count, segment.length)
            found = ops.sweep_attention(
                heads[lo:hi, mine], keys, values, start, spec.window, spec.scale
            )
            mixed[lo:hi, mine] = found.view(hi - lo, -1, spec.head_dim)
            lo = hi
            yield

    def _keys_values(
        self, heads: torch.Tensor, segment: Segment, kv: LayerKV, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a segment from position 0: [positions, kv_heads, head_dim]."""
        if segment.row.start == 0:
            keys, values = heads[:, first:].chunk(2, 1)
            return keys, values
        both = kv.gather(segment.table)[: segment.end]
        return both[:, 0], both[:, 1]

    def _feed_forward(self, layer: DecoderLayer) -> Iterator[None]:
        x = self._x
        if layer.spec.moe is None:
            size = self._pieces.rows(3 * layer.spec.intermediate)
            for lo in range(0, len(x), size):
                rows = x[lo : lo + size]
                layer.add(rows, layer.dense(layer.post_norm(rows)))
                yield
            return
        normed, out = torch.empty_like(x), torch.zeros_like(x)
        weights, ids = [], []
        shared = layer.spec.moe.shared
        width = layer.spec.moe.experts + (3 * shared.intermediate if shared else 0)
        size = min(512, self._pieces.rows(width))
        for lo in range(0, len(x), size):
            normed[lo : lo + size] = layer.post_norm(x[lo : lo + size])
            share, chosen = layer.route(normed[lo : lo + size])
            if layer.has_shared:
                out[lo : lo + size] = layer.shared(normed[lo : lo + size])
            weights.append(share)
            ids.append(chosen)
            yield
        names: list[str] = []
        if self._experts.wants_sequences:
            names = [segment.row.id for segment in self.segments for _ in range(segment.length)]
        yield from self._experts.pieces(
            layer.ordinal, normed, cat_rows(weights), cat_rows(ids), names, out
        )
        layer.add(x, out)


_DONE = object()
