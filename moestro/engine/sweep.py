"""A sweep: prompt tokens travelling up the layers, a bounded piece of work at a time.

Owns: the state of one sweep between pieces. Between any two pieces the engine may run a decode
step, so nothing is leased while a sweep rests, and a dropped segment never writes KV again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moestro.engine.batch import Segment, build_segment, cat_rows
from moestro.engine.decoder import Decoder, DecoderLayer
from moestro.engine.experts import ExpertExecutor
from moestro.engine.pieces import Pieces
from moestro.kv_cache.storage import KVStorage, LayerKV
from moestro.scheduler.plan import SweepPlan


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
            build_segment(row, kv.block_size, kv.layers, decoder.rotary, kv.kinds)
            for row in plan.rows
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
        attention = layer.attention
        projected = x.new_empty(segment.length, attention.projected)
        size = self._pieces.rows(attention.projected)
        for lo in range(0, segment.length, size):
            hi = min(lo + size, segment.length)
            normed = layer.input_norm(x[lo:hi])
            projected[lo:hi] = attention.project(normed, segment.cos[lo:hi], segment.sin[lo:hi])
            if not segment.alive:
                out.zero_()
                return
            attention.write(projected[lo:hi], segment, kv, lo)
            yield
        if not segment.alive:
            out.zero_()
            return
        mixed = x.new_empty(segment.length, attention.mixed)
        yield from attention.mix(projected, segment, kv, self._pieces, mixed)
        size = self._pieces.rows(attention.mixed)
        for lo in range(0, segment.length, size):
            rows = slice(lo, lo + size)
            out[rows] = attention.output(mixed[rows], x[rows])
            yield

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
