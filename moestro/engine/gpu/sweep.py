"""A sweep on the device: prompt tokens travelling up the layers while experts stream past.

Owns: the state of one sweep between pieces, its workspace, and which experts are asked for ahead.
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
import torch.nn.functional as F

from moestro.engine.decoder import DecoderLayer
from moestro.engine.gpu.step import Shared, product, project
from moestro.engine.models.spec import ModelSpec, QKNorm, RouterDtype
from moestro.engine.weights import LayerWeights
from moestro.expert_cache.residency import STAGE, Placement
from moestro.expert_cache.stream import Batch, ExpertStream
from moestro.kernels import reference
from moestro.kernels.gpu.attention_sweep import sweep_attention
from moestro.kernels.gpu.combine import combine
from moestro.kernels.gpu.experts_sweep import Tiles, plan_tiles, sweep_down, sweep_up, tile_rows
from moestro.kernels.gpu.grouping import Routes, sort_routes
from moestro.kernels.gpu.norm import add_rms_norm, rms_norm
from moestro.kernels.gpu.rotary import qk_norm_rope_write
from moestro.kernels.gpu.router import softmax_topk
from moestro.kernels.gpu.transfer import Mark, download, send
from moestro.scheduler.plan import SweepPlan, SweepRow

Ints = npt.NDArray[np.int64]

# With at least this many routes an expert, nearly all experts of a layer should be touched: they
# are fetched before the router has spoken, for as long as the layers so far bear that out.
ROUTES_TO_TOUCH_ALL = 6
NEARLY_ALL = 0.95


class Workspace:
    """Activations of up to `tokens` tokens, the widest layer at a time."""

    def __init__(self, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device):
        attention, moe = spec.attention, spec.moe
        heads = attention.heads + 2 * attention.kv_heads
        routes = tokens * moe.top_k

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.tokens = tokens
        self.residual = empty(tokens, spec.hidden)
        self.normed = empty(tokens, spec.hidden)
        self.qkv = empty(tokens, heads * attention.head_dim)
        self.q = empty(tokens, attention.heads, attention.head_dim)
        self.mixed = empty(tokens, attention.heads * attention.head_dim)
        self.added = empty(tokens, spec.hidden)
        self.routing = empty(tokens, moe.experts)
        share = torch.float32 if moe.router_dtype is RouterDtype.FLOAT32 else dtype
        self.weights = empty(routes, dtype=share)
        self.ids = empty(routes, dtype=torch.int32)
        self.inner = empty(routes, moe.intermediate)
        self.outer = empty(routes, spec.hidden)
        self.routes = Routes.empty(routes, moe.experts, device)

    @staticmethod
    def nbytes(spec: ModelSpec, tokens: int, size: int) -> int:
        """What `Workspace` takes for elements of `size` bytes."""
        attention, moe = spec.attention, spec.moe
        heads = 3 * attention.heads + 2 * attention.kv_heads
        width = 3 * spec.hidden + heads * attention.head_dim + moe.experts
        routed = moe.top_k * ((spec.hidden + moe.intermediate) * size + 16)
        return tokens * (width * size + routed)


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
        self.count = sum(len(row.tokens) for row in plan.rows)
        moe = shared.spec.moe
        self._touches_all = self.count * moe.top_k >= ROUTES_TO_TOUCH_ALL * moe.experts
        self._reserved: dict[int, Placement] = {}  # slots taken for experts still to come
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
        self._real = self._send(np.array([self.count], np.int32))

    def _send(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return send(values, self._shared.tables.device)

    def _run(self) -> Iterator[None]:
        shared, space, count = self._shared, self._space, self.count
        layers, eps = shared.decoder.layers, shared.spec.norm_eps
        residual, normed = space.residual[:count], space.normed[:count]
        rms_norm(residual, layers[0].weights.input_norm, eps, out=normed)
        norms = [layer.weights.input_norm for layer in layers[1:]] + [shared.decoder.final_norm]
        for index, (layer, after) in enumerate(zip(layers, norms, strict=True)):
            if not any(segment.alive for segment in self.segments):
                return
            yield from self._attend(index, layer)
            if layer.spec.moe is None:
                self._dense(layer.weights, after)
                yield
            else:
                yield from self._experts(layer)
                weights = space.weights[: count * layer.spec.moe.top_k].view(count, -1)
                outer = space.outer[: count * layer.spec.moe.top_k]
                combine(outer, weights, residual, after, eps, out=normed)

    def _attend(self, index: int, layer: DecoderLayer) -> Iterator[None]:
        shared, space, count = self._shared, self._space, self.count
        spec, weights, eps = layer.spec.attention, layer.weights, self._shared.spec.norm_eps
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
        )
        for segment in self.segments:
            if not segment.alive:
                mixed[segment.span].zero_()
                continue
            sweep_attention(
                q[segment.span],
                shared.kv.pool,
                index,
                segment.table,
                segment.row.start,
                spec.scale,
                spec.window,
                out=mixed[segment.span],
            )
        yield
        added = space.added[:count]
        product(mixed, weights.out, weights.out_bias, added)
        normed, residual = space.normed[:count], space.residual[:count]
        add_rms_norm(added, residual, weights.post_norm, eps, out=normed)

    def _dense(self, weights: LayerWeights, after: torch.Tensor) -> None:
        assert weights.gate_up is not None and weights.down is not None
        normed, residual = self._space.normed[: self.count], self._space.residual[: self.count]
        inner = reference.swiglu(F.linear(normed, weights.gate_up))
        added = F.linear(inner, weights.down)
        add_rms_norm(added, residual, after, self._shared.spec.norm_eps, out=normed)

    def _experts(self, layer: DecoderLayer) -> Iterator[None]:
        """Routed experts of a layer into `outer`: residents first, then as they arrive."""
        counts = self._route(layer)
        self._ahead(layer.ordinal, None)
        yield
        found = counts()
        self._touches_all &= bool((found > 0).mean() >= NEARLY_ALL)
        cache = self._shared.cache
        cache.residency.begin_pass("sweep", resumed=layer.ordinal > 0)
        wanted, slots = cache.residency.want(layer.ordinal, found, None)
        here = slots >= 0
        missing = set(wanted[~here].tolist())
        self._compute(wanted[here].tolist(), slots[here].tolist())
        yield
        fetched = 0
        self._reserved = self._placements(layer.ordinal, missing, found)
        while missing:
            self._ahead(layer.ordinal, missing)
            batch = self._stream.take()
            if batch.layer == layer.ordinal:
                fetched += self._use(batch, missing)
            self._stream.used(batch)
            yield
        cache.swept(layer.ordinal, int(here.sum()), fetched)

    def _route(self, layer: DecoderLayer) -> Counts:
        space, moe, count = self._space, layer.spec.moe, self.count
        assert moe is not None and layer.weights.router is not None
        routing = space.routing[:count]
        product(space.normed[:count], layer.weights.router, None, routing)
        ids = space.ids[: count * moe.top_k].view(count, -1)
        weights = space.weights[: count * moe.top_k].view(count, -1)
        softmax_topk(routing, self._real, moe.top_k, moe.renormalize, weights=weights, ids=ids)
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
            if cache.table.slot_of[place.key] >= 0:  # a decode step has fetched it meanwhile
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
        both = self._send(np.array([experts, slots], np.int32))
        tiles = Tiles.empty(routes, len(experts), rows, both.device)
        plan_tiles(space.routes.offsets, both[0], both[1], out=tiles)
        order, slab = space.routes.order, shared.cache.slab
        inner, outer = space.inner[:routes], space.outer[:routes]
        sweep_up(space.normed[:count], order, tiles, slab, moe.top_k, y=inner)
        offset = shared.cache.layout.part("down").offset
        sweep_down(inner, order, tiles, slab, offset, z=outer)

    def _ahead(self, layer: int, missing: set[int] | None) -> None:
        """Start what there is room for: first what this layer lacks, then the next layers when
        this sweep will touch nearly all of them. `missing` None: the router has not spoken."""
        for at, lacking in self._order(layer, missing):
            while self._stream.has_room:
                chosen = self._next(at, lacking)
                if not chosen:
                    break
                self._stream.start(at, chosen)

    def _order(self, layer: int, missing: set[int] | None) -> Iterator[tuple[int, set[int] | None]]:
        """Layers to fetch for, and what they are known to lack."""
        layers = self._shared.cache.layers
        if missing is not None:
            yield layer, missing
        if self._touches_all:
            for at in range(layer + (missing is not None), min(layer + 3, layers)):
                yield at, None

    def _next(self, layer: int, missing: set[int] | None) -> list[int]:
        """The first experts of a layer that nobody has asked for yet."""
        coming = {e for batch in self._stream.coming if batch.layer == layer for e in batch.experts}
        row = self._shared.cache.table.rows[layer]
        lacks = np.flatnonzero(row < 0).tolist() if missing is None else sorted(missing)
        return [expert for expert in lacks if expert not in coming][: self._stream.size]


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
