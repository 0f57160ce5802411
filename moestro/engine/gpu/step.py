"""One decode step of a fixed number of rows as device operations, to be captured in a graph.

Owns: the order of kernels and their buffers. Nothing here waits for the device or asks the host.
Does not own: capture and launch (`engine.gpu.graphs`), or which expert may leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.engine.decoder import Decoder, DecoderLayer
from moestro.engine.gpu.buffers import PREPARED, Report, StepInput
from moestro.engine.gpu.expert_kernels import ExpertKernels
from moestro.engine.gpu.mlp import Mlp
from moestro.engine.gpu.norms import Norms
from moestro.engine.gpu.product import product
from moestro.engine.gpu.routers import Router
from moestro.engine.gpu.sampler import scramble_
from moestro.engine.models.spec import ModelSpec, QKNorm, RouterDtype
from moestro.expert_cache.device_cache import DeviceCache
from moestro.kernels import reference
from moestro.kernels.gpu import sampling
from moestro.kernels.gpu.acquire import acquire
from moestro.kernels.gpu.attention_decode import choose_splits, decode_attention, scratch_floats
from moestro.kernels.gpu.combine import Beside, combine
from moestro.kernels.gpu.cpu_share import CpuLink, collect
from moestro.kernels.gpu.fetch import fetch
from moestro.kernels.gpu.norm import Norm, add_norm, apply_norm
from moestro.kernels.gpu.prepare import Prepared, prepare
from moestro.kernels.gpu.rotary import qk_norm_rope_write
from moestro.kernels.gpu.tables import LayerWork
from moestro.kernels.gpu.transfer import processors
from moestro.kv_cache.storage import KVStorage


@dataclass(frozen=True, slots=True)
class Shared:
    """What steps of every size share."""

    decoder: Decoder
    norms: Norms
    router: Router
    cache: DeviceCache
    kv: KVStorage
    given: StepInput
    sampled: torch.Tensor  # int64 [most rows], by the last step
    tables: torch.Tensor  # int32 [most rows, blocks of the longest sequence + 1 spare]
    logits: torch.Tensor  # float32 [most rows, vocab]
    inverse: torch.Tensor  # rotary frequencies
    cpu: CpuLink | None  # where a share of the misses is computed
    timed: bool  # note when fetches start and end
    scramble: bool  # tokens are made up, for benchmarks
    forced: torch.Tensor | None  # int32 [layers, most rows, top_k]: routing that is made up
    law: torch.Tensor | None  # float32 [layers, experts]: log p of made-up routing in sweeps

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.decoder.spec


class Step:
    """Buffers and operations for `rows` rows."""

    def __init__(self, shared: Shared, rows: int) -> None:
        spec, device = shared.spec, shared.tables.device
        moe, attention, dtype = spec.moe, spec.attention, shared.decoder.dtype
        routes = rows * moe.top_k
        self.rows = rows
        self._shared = shared
        self._work = LayerWork.empty(moe.experts, routes, device)
        self._kernels = ExpertKernels(shared.cache.layout, moe.activation)
        layers = len(spec.moe_layers)
        self.report = Report(rows, layers, moe.top_k, self._work.groups, device)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        width = attention.heads * attention.head_dim
        self._residual = empty(rows, spec.hidden)
        self._ready = Prepared(
            residual=self._residual,
            lengths=empty(rows, dtype=torch.int32),
            temperature=empty(rows, dtype=torch.float32),
            top_k=empty(rows, dtype=torch.int32),
            rows=empty(1, dtype=torch.int32),
        )
        self._normed = empty(rows, spec.hidden)
        self._q = empty(rows, attention.heads, attention.head_dim)
        self._mixed = empty(rows, width)
        self._qkv = empty(rows, width + 2 * attention.kv_heads * attention.head_dim)
        self._added = empty(rows, spec.hidden)
        self._routing = empty(rows, moe.experts, dtype=torch.float32 if moe.wide else dtype)
        share = torch.float32 if moe.router_dtype is RouterDtype.FLOAT32 else dtype
        self._weights = empty(rows, moe.top_k, dtype=share)
        self._inner = empty(routes, moe.intermediate)
        self._outer = empty(routes, spec.hidden)
        self._mlp = Mlp(spec, rows, dtype, device)
        self._splits = choose_splits(rows, attention.kv_heads, processors(device))
        floats = scratch_floats(rows, attention.heads, attention.head_dim, self._splits)
        self._scratch = empty(max(1, floats), dtype=torch.float32)
        self._draw = sampling.Scratch.empty(rows, spec.vocab_size, device)

    def run(self) -> None:
        """Launch everything."""
        shared, spec = self._shared, self._shared.spec
        ready, given = self._ready, shared.given
        prepare(
            given.device,
            PREPARED,
            shared.sampled,
            shared.decoder.embedding,
            shared.tables,
            out=ready,
            scale=spec.embedding_scale,
        )
        places, positions = given.line("place", self.rows), given.line("position", self.rows)
        layers = shared.decoder.layers
        apply_norm(self._residual, shared.norms.first, out=self._normed)
        for index, (layer, after) in enumerate(zip(layers, shared.norms.after, strict=True)):
            self._attend(index, layer, positions, places, ready.lengths)
            if layer.spec.moe is None:
                self._dense(layer, after)
            else:
                self._experts(layer, ready.rows, after)
        self._sample()

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        positions: torch.Tensor,
        places: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        shared, weights, spec = self._shared, layer.weights, layer.spec.grouped
        qkv = project(self._normed, layer, shared.spec.norm_eps, self._qkv)
        head_norm = spec.qk_norm is QKNorm.HEAD
        qk_norm_rope_write(
            qkv,
            positions,
            places,
            shared.inverse,
            shared.kv.pool,
            index,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            weights.q_norm if head_norm else None,
            weights.k_norm if head_norm else None,
            shared.spec.norm_eps,
            None if spec.qk_norm is QKNorm.FULL else spec.clip,
            q_out=self._q,
            magnitude=shared.decoder.rotary.magnitude,
        )
        decode_attention(
            self._q,
            shared.kv.pool,
            index,
            shared.tables[: self.rows],
            lengths,
            spec.scale,
            spec.window,
            out=self._mixed,
            scratch=self._scratch,
            splits=self._splits,
            sinks=weights.sinks,
        )
        product(self._mixed, weights.out, weights.out_bias, self._added)
        self._add(shared.norms.post[index])

    def _experts(self, layer: DecoderLayer, count: torch.Tensor, after: Norm) -> None:
        shared, moe = self._shared, layer.spec.moe
        assert moe is not None
        cache, log, number = shared.cache, self.report.log, layer.ordinal
        ids = self.report.on_device["ids"][number]
        shared.router.score(layer.weights, self._normed, self._routing)
        shared.router.choose(layer.weights, self._routing, count, weights=self._weights, ids=ids)
        if shared.forced is not None:
            self._force(number, count, ids)
        cpu, timed, x = shared.cpu, shared.timed, self._normed
        split = cpu is not None
        acquire(number, ids, cache.tables, work=self._work, log=log, split=split, timed=timed)
        if not cache.complete:
            size = cache.slab.shape[1]
            fetch(number, self._work, cache.slab, size, log, cpu=cpu, x=x, timed=timed)
        self._kernels.decode(
            self._normed, self._work, cache.slab, moe.top_k, y=self._inner, z=self._outer
        )
        if cpu is not None:
            fault = cache.tables.fault
            collect(number, self._work, cpu, fault, log, z=self._outer, timed=timed)
        combine(
            self._outer,
            self._weights,
            self._residual,
            after,
            out=self._normed,
            beside=self._beside(layer),
            scale=shared.spec.residual_scale,
        )

    def _beside(self, layer: DecoderLayer) -> Beside | None:
        """Compute the shared expert, where there is one."""
        if not layer.has_shared:
            return None
        self._mlp.shared(layer.weights, self._normed)
        return self._mlp.beside(self.rows)

    def _force(self, number: int, count: torch.Tensor, ids: torch.Tensor) -> None:
        """Replace the routed ids by made-up ones; the weights stay."""
        assert self._shared.forced is not None
        real = torch.arange(self.rows, device=ids.device)[:, None] < count
        ids.copy_(torch.where(real, self._shared.forced[number, : self.rows], -1))

    def _dense(self, layer: DecoderLayer, after: Norm) -> None:
        self._mlp.dense(layer.weights, self._normed, self._added)
        self._add(after)

    def _add(self, norm: Norm) -> None:
        """What was computed is added to the residual stream, which is normed for what follows."""
        scale = self._shared.spec.residual_scale
        add_norm(self._added, self._residual, norm, out=self._normed, scale=scale)

    def _sample(self) -> None:
        """Tokens of all rows, except that top-k and top-p are not applied here."""
        shared, rows = self._shared, self.rows
        logits = shared.logits[:rows]
        logits.copy_(shared.decoder.score(self._normed))
        finite = self.report.on_device["finite"]
        sampling.sample(
            logits,
            self.sampling(),
            0,
            scratch=self._draw,
            tokens=shared.sampled[:rows],
            finite=finite,
        )
        self.scramble()

    def sampling(self) -> sampling.Rows:
        """The rows' parameters, as the last run of this step had them."""
        return self._shared.given.sampling(self.rows, self._ready)

    def scramble(self) -> None:
        """Make the tokens up, when that was asked for."""
        shared = self._shared
        if shared.scramble:
            salt = shared.given.line("salt", self.rows)
            scramble_(shared.sampled[: self.rows], salt, shared.spec.vocab_size)

    def finish(self) -> None:
        """Gather what the report is to say, after whatever was done to the tokens."""
        view = self.report.on_device
        view["tokens"].copy_(self._shared.sampled[: self.rows])
        view["fault"].copy_(self._shared.cache.tables.fault)


def project(x: torch.Tensor, layer: DecoderLayer, eps: float, qkv: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of x [T, hidden] into `qkv`, with the norms that span all heads
    applied. Returns it."""
    weights, spec = layer.weights, layer.spec.grouped
    product(x, weights.qkv, weights.qkv_bias, qkv)
    if spec.qk_norm is not QKNorm.FULL:
        return qkv
    assert weights.q_norm is not None and weights.k_norm is not None
    q = spec.heads * spec.head_dim
    kv = spec.kv_heads * spec.head_dim
    qkv[:, :q] = reference.rms_norm(qkv[:, :q], weights.q_norm, eps)
    qkv[:, q : q + kv] = reference.rms_norm(qkv[:, q : q + kv], weights.k_norm, eps)
    return qkv if spec.clip is None else qkv.clamp_(-spec.clip, spec.clip)
