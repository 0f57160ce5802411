"""A sweep on the device: prompt tokens travelling up the layers while experts stream past.

Owns: the state of one sweep between pieces, and which experts are asked for ahead.
Does not own: the staging groups (`expert_cache.stream`) or the kernels. The host launches a piece
and yields; the engine may put decode steps between any two. A dropped sequence writes no KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moestro.engine.decoder import DecoderLayer
from moestro.engine.gpu.expert_kernels import ExpertKernels
from moestro.engine.gpu.product import product
from moestro.engine.gpu.routers import Softmax
from moestro.engine.gpu.step import Shared, project
from moestro.engine.gpu.workspace import Workspace
from moestro.engine.models.spec import QKNorm
from moestro.expert_cache.residency import STAGE, Placement
from moestro.expert_cache.stream import Batch, ExpertStream
from moestro.kernels.gpu.attention_sweep import sweep_attention
from moestro.kernels.gpu.combine import combine
from moestro.kernels.gpu.experts_sweep import Tiles, plan_tiles, tile_rows
from moestro.kernels.gpu.grouping import sort_routes
from moestro.kernels.gpu.norm import Norm, add_norm, apply_norm
from moestro.kernels.gpu.rotary import qk_norm_rope_write
from moestro.kernels.gpu.transfer import Mark, download, send
from moestro.scheduler.plan import SweepPlan, SweepRow

Ints = npt.NDArray[np.int64]

# With at least this many routes an expert, nearly all experts of a layer should be touched: they
# are fetched before the router has spoken, for as long as the layers so far bear that out.
ROUTES_TO_TOUCH_ALL = 6
NEARLY_ALL = 0.95
# Where they do not, the next layer's router is asked early, on what goes into this layer's experts.
# An expert that is foretold so many routes is fetched; sweeps of fewer routes than experts ask not.
FORETOLD = 2
# What one piece may be, so that a decode step can come soon: about a millisecond on a large GPU.
SCORES_OF_A_PIECE = 1 << 25  # attention: rows times keys
LEAST_ROWS = 512
ROUTES_OF_A_PIECE = 1 << 15


@dataclass(slots=True)
class Segment:
    """One sequence's run of prompt tokens. Dropped ones are computed on, but write no KV."""

    row: SweepRow
    span: slice  # of the workspace's rows
    table: torch.Tensor  # int32 [blocks]
    alive: bool = True


class GpuSweep:
    """Runs one `SweepPlan`. Call `advance` until it says that it is finished."""

    def __init__(
        self, plan: SweepPlan, shared: Shared, stream: ExpertStream, workspace: Workspace
    ) -> None:
        self._shared = shared
        self._stream = stream
        self._space = workspace
        moe = shared.spec.moe
        self._kernels = ExpertKernels(shared.cache.layout, moe.activation)
        self.count = sum(len(row.tokens) for row in plan.rows)
        routes = self.count * moe.top_k
        self._touches_all = routes >= ROUTES_TO_TOUCH_ALL * moe.experts
        self._asks_early = routes >= moe.experts and not shared.cache.complete
        self._reserved: dict[int, Placement] = {}  # slots taken for experts still to come
        self._foretold: list[int] | None = None  # experts of the next layer, likeliest first
        self._upload(plan)
        self._work = self._run()

    def advance(self) -> bool:
        """Launch one piece; True when the sweep has reached the top."""
        return next(self._work, _DONE) is _DONE

    def drop(self, id: str) -> None:
        """This sequence left: its segment writes nothing from now on."""
        for segment in self.segments:
            if segment.row.id == id:
                segment.alive = False
                self._places[segment.span] = -1

    def top(self) -> list[tuple[Segment, torch.Tensor]]:
        """After the last piece: each live segment with its rows after the final norm."""
        return [(s, self._space.normed[s.span]) for s in self.segments if s.alive]

    def close(self) -> None:
        """Give up what was asked for ahead, and slots that were to be filled."""
        self._stream.drop()
        for place in self._reserved.values():
            self._shared.cache.table.release(place.slot)
            self._shared.cache.dirty = True
        self._reserved.clear()

    def _upload(self, plan: SweepPlan) -> None:
        shared, size, layers = self._shared, self._shared.kv.block_size, self._shared.kv.layers
        tokens, positions, places = [], [], []
        self.segments: list[Segment] = []
        lo = 0
        for row in plan.rows:
            at = np.arange(row.start, row.start + len(row.tokens))
            table = np.array(row.blocks, np.int64)
            places.append(table[at // size] * layers * size + at % size)
            positions.append(at)
            tokens.append(np.array(row.tokens, np.int64))
            used = -(-int(at[-1] + 1) // size)
            blocks = self._send(table[:used].astype(np.int32))
            self.segments.append(Segment(row, slice(lo, lo + len(at)), blocks))
            lo += len(at)
        self._positions = self._send(np.concatenate(positions))
        self._places = self._send(np.concatenate(places))
        ids = self._send(np.concatenate(tokens))
        rows = self._space.residual[: self.count]
        torch.index_select(shared.decoder.embedding, 0, ids, out=rows)
        if shared.spec.embedding_scale != 1.0:
            rows *= shared.spec.embedding_scale
        self._real = self._send(np.array([self.count], np.int32))

    def _send(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return send(values, self._shared.tables.device)

    def _run(self) -> Iterator[None]:
        shared, space, count = self._shared, self._space, self.count
        layers, norms = shared.decoder.layers, shared.norms
        residual, normed = space.residual[:count], space.normed[:count]
        apply_norm(residual, norms.first, out=normed)
        routed = [layer for layer in layers if layer.spec.moe is not None][1:]
        following = iter([*routed, None])
        for index, (layer, after) in enumerate(zip(layers, norms.after, strict=True)):
            if not any(segment.alive for segment in self.segments):
                return
            yield from self._attend(index, layer)
            if layer.spec.moe is None:
                yield from self._dense(layer, after)
            else:
                yield from self._experts(layer, next(following))
                beside = space.mlp.beside(count) if layer.has_shared else None
                weights = space.weights[: count * layer.spec.moe.top_k].view(count, -1)
                outer = space.outer[: count * layer.spec.moe.top_k]
                scale = shared.spec.residual_scale
                combine(outer, weights, residual, after, out=normed, beside=beside, scale=scale)

    def _attend(self, index: int, layer: DecoderLayer) -> Iterator[None]:
        shared, space, count = self._shared, self._space, self.count
        spec, weights, eps = layer.spec.grouped, layer.weights, self._shared.spec.norm_eps
        q, mixed = space.q[:count], space.mixed[:count]
        qkv = space.qkv[:count]
        project(space.normed[:count], layer, eps, qkv)
        head_norm = spec.qk_norm is QKNorm.HEAD
        qk_norm_rope_write(
            qkv,
            self._positions,
            self._places,
            shared.inverse,
            shared.kv.pool,
            index,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            weights.q_norm if head_norm else None,
            weights.k_norm if head_norm else None,
            eps,
            None if spec.qk_norm is QKNorm.FULL else spec.clip,
            q_out=q,
            magnitude=shared.decoder.rotary.magnitude,
        )
        for segment in self.segments:
            if not segment.alive:
                mixed[segment.span].zero_()
                continue
            for lo, hi in _row_pieces(segment.row.start, len(segment.row.tokens)):
                rows = slice(segment.span.start + lo, segment.span.start + hi)
                sweep_attention(
                    q[rows],
                    shared.kv.pool,
                    index,
                    segment.table,
                    segment.row.start + lo,
                    spec.scale,
                    spec.window,
                    out=mixed[rows],
                    sinks=weights.sinks,
                )
                if rows.stop < segment.span.stop:
                    yield
        yield
        added = space.added[:count]
        product(mixed, weights.out, weights.out_bias, added)
        self._add(shared.norms.post[index])

    def _dense(self, layer: DecoderLayer, after: Norm) -> Iterator[None]:
        space = self._space
        for rows in space.mlp.pieces(self.count):
            space.mlp.dense(layer.weights, space.normed[rows], space.added[rows])
            yield
        self._add(after)

    def _beside(self, layer: DecoderLayer) -> Iterator[None]:
        """The shared expert, where there is one."""
        if not layer.has_shared:
            return
        space = self._space
        for rows in space.mlp.pieces(self.count):
            space.mlp.shared(layer.weights, space.normed[rows], rows.start)
            yield

    def _add(self, norm: Norm) -> None:
        """`added` goes to the residual stream, which is normed for what follows."""
        space, count, scale = self._space, self.count, self._shared.spec.residual_scale
        residual, normed = space.residual[:count], space.normed[:count]
        add_norm(space.added[:count], residual, norm, out=normed, scale=scale)

    def _experts(self, layer: DecoderLayer, following: DecoderLayer | None) -> Iterator[None]:
        """Routed experts of a layer into `outer`: residents first, then as they arrive."""
        foretold = None
        if self._asks_early and not self._touches_all and following is not None:
            foretold = self._route(following, early=True)
        counts = self._route(layer)
        self._ahead(layer.ordinal, None)
        yield
        yield from self._beside(layer)
        found = counts()
        self._touches_all &= bool((found > 0).mean() >= NEARLY_ALL)
        self._foretold = None
        if foretold is not None:
            expected = foretold()
            order = np.argsort(-expected, kind="stable")
            self._foretold = order[expected[order] >= FORETOLD].tolist()
        cache = self._shared.cache
        cache.residency.begin_pass("sweep", resumed=layer.ordinal > 0)
        wanted = cache.residency.want(layer.ordinal, found, None)[0].astype(np.int64)
        slots, missing, fetched = cache.table.rows[layer.ordinal], set[int](), 0
        if not self._stream.size and (slots[wanted] < 0).any():  # not all slots are filled yet
            away = wanted[slots[wanted] < 0].tolist()
            fetched = len(away)
            self._stream.seat(layer.ordinal, away)
        for experts in _route_pieces(wanted, found):
            # Read anew for each piece: a decode step between them may have changed it.
            here = slots[experts] >= 0
            missing.update(experts[~here].tolist())
            self._compute(experts[here].tolist(), slots[experts[here]].tolist())
            yield
        self._reserved = self._placements(layer.ordinal, missing, found)
        while missing:
            self._ahead(layer.ordinal, missing)
            batch = self._stream.take()
            used = self._use(batch, missing) if batch.layer == layer.ordinal else 0
            fetched += used
            if batch.early:
                cache.prefetched(used, len(batch.experts) - used)
            self._stream.used(batch)
            yield
        self._ahead(layer.ordinal, missing)
        cache.swept(layer.ordinal, len(wanted) - fetched, fetched)

    def _route(self, layer: DecoderLayer, *, early: bool = False) -> Counts:
        """Sort the tokens' routes by expert; returns how many each expert has. `early`: of a layer
        that is still to come, judged by what this one's attention has left."""
        space, moe, count, shared = self._space, layer.spec.moe, self.count, self._shared
        assert moe is not None
        routing, rows = space.routing[:count], space.normed[:count]
        if early:
            rows = space.added[:count]
            apply_norm(space.residual[:count], shared.norms.routed[layer.ordinal], out=rows)
        router = shared.router
        router.score(layer.weights, rows, routing)
        if shared.law is not None:  # the greatest log p + Gumbel noise: drawn without replacement
            routing.exponential_().log_().neg_().add_(shared.law[layer.ordinal])
            router = Softmax(moe.top_k, moe.renormalize)
        ids = space.ids[: count * moe.top_k].view(count, -1)
        weights = space.weights[: count * moe.top_k].view(count, -1)
        router.choose(layer.weights, routing, self._real, weights=weights, ids=ids)
        sort_routes(ids, moe.experts, out=space.routes)
        return Counts(space.routes.counts)

    def _placements(self, layer: int, missing: set[int], counts: Ints) -> dict[int, Placement]:
        """Which of the missing experts will stay, and where."""
        if not missing:
            return {}
        residency = self._shared.cache.residency
        keys = np.array(sorted(missing), np.int64)
        placed = residency.place(layer, keys, counts)
        self._shared.cache.dirty = True
        for place in placed:
            if place.evicted >= 0:
                self._shared.cache.arena.table.shadow(place.evicted, False)
        return {place.expert: place for place in placed if place.slot != STAGE}

    def _use(self, batch: Batch, missing: set[int]) -> int:
        """Compute with what a batch brought; returns how many of it were wanted."""
        cache = self._shared.cache
        pairs = [
            (expert, slot)
            for expert, slot in zip(batch.experts, batch.slots, strict=False)
            if expert in missing
        ]
        self._compute([expert for expert, _ in pairs], [slot for _, slot in pairs])
        for expert, slot in pairs:
            missing.discard(expert)
            place = self._reserved.pop(expert, None)
            if place is None:
                continue
            cache.dirty = True
            if cache.table.slot_of[place.key] >= 0:  # decode or the fill brought it meanwhile
                cache.table.release(place.slot)
            else:
                cache.slab[place.slot].copy_(cache.slab[slot])
                cache.table.bind(place.slot, place.key)
                cache.arena.table.shadow(place.key, True)
        return len(pairs)

    def _compute(self, experts: list[int], slots: list[int]) -> None:
        if not experts:
            return
        shared, space = self._shared, self._space
        moe, count = shared.spec.moe, self.count
        routes = count * moe.top_k
        rows = tile_rows(routes, moe.experts, shared.decoder.dtype)
        # Lines of one length, so that the kernels see pointers of one alignment.
        both = np.zeros((2, -(-moe.experts // 4) * 4), np.int32)
        both[:, : len(experts)] = experts, slots
        given = self._send(both)[:, : len(experts)]
        tiles = Tiles.empty(routes, len(experts), rows, given.device)
        plan_tiles(space.routes.offsets, given[0], given[1], out=tiles)
        order, slab = space.routes.order, shared.cache.slab
        inner, outer = space.inner[:routes], space.outer[:routes]
        self._kernels.sweep(space.normed[:count], order, tiles, slab, moe.top_k, inner, outer)

    def _ahead(self, layer: int, missing: set[int] | None) -> None:
        """Start what there is room for: first what this layer lacks, then what later layers
        should. `missing` None: the router has not spoken."""
        for at, lacking in self._order(layer, missing):
            while self._stream.has_room:
                chosen = self._next(at, lacking)
                if not chosen:
                    break
                self._stream.start(at, chosen, early=at != layer or missing is None)

    def _order(self, layer: int, missing: set[int] | None) -> Iterator[tuple[int, list[int]]]:
        """Layers to fetch for, and what they lack or should lack."""
        cache = self._shared.cache
        if missing is not None:
            yield layer, sorted(missing)
        if self._touches_all:
            for at in range(layer + (missing is not None), min(layer + 3, cache.layers)):
                yield at, np.flatnonzero(cache.table.rows[at] < 0).tolist()
        elif missing is not None and self._foretold is not None:
            row = cache.table.rows[layer + 1]
            yield layer + 1, [expert for expert in self._foretold if row[expert] < 0]

    def _next(self, layer: int, lacking: list[int]) -> list[int]:
        """The first of them that nobody has asked for yet."""
        coming = {e for batch in self._stream.coming if batch.layer == layer for e in batch.experts}
        return [expert for expert in lacking if expert not in coming][: self._stream.size]


def _row_pieces(start: int, count: int) -> Iterator[tuple[int, int]]:
    """Rows [lo, hi) of a run that begins behind `start` tokens, for one piece of attention each."""
    lo = 0
    while lo < count:
        rows = SCORES_OF_A_PIECE // (start + count) // LEAST_ROWS * LEAST_ROWS
        hi = min(count, lo + max(LEAST_ROWS, rows))
        yield lo, hi
        lo = hi


def _route_pieces(experts: Ints, counts: Ints) -> list[Ints]:
    """Experts in groups whose routes a piece can compute."""
    bins = np.cumsum(counts[experts]) // ROUTES_OF_A_PIECE
    return np.split(experts, np.flatnonzero(np.diff(bins)) + 1)


class Counts:
    """Routes of each expert, on their way to the host."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._host = download(counts)
        self._arrived = Mark(counts.device)
        self._arrived.set()

    def __call__(self) -> Ints:
        """Wait for them: [experts]."""
        self._arrived.wait()
        return self._host.numpy()[:-1].astype(np.int64)


_DONE = object()
