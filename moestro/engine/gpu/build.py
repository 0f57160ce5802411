"""Joins the parts that run on a CUDA device.

Owns: the order of construction there. `engine.build` does the rest, for every kind of device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from moestro.config import Config
from moestro.engine.decoder import Decoder
from moestro.engine.gpu.buffers import StepInput
from moestro.engine.gpu.executor import GpuExecutor
from moestro.engine.gpu.graphs import Graphs
from moestro.engine.gpu.memory import MARGIN, OUTSIDE
from moestro.engine.gpu.norms import Norms
from moestro.engine.gpu.routers import build_router
from moestro.engine.gpu.sampler import DeviceSampler
from moestro.engine.gpu.step import Shared
from moestro.engine.gpu.sweep import GpuSweep
from moestro.engine.gpu.workspace import Workspace
from moestro.engine.memory import MemoryPlan
from moestro.engine.models.activation import SwiGLU
from moestro.engine.synthetic import RoutingSource
from moestro.errors import ConfigError
from moestro.expert_cache.cpu_share import CpuShare
from moestro.expert_cache.device_cache import DeviceCache
from moestro.expert_cache.policy import Policy
from moestro.expert_cache.store import ExpertStore
from moestro.expert_cache.stream import ExpertStream
from moestro.expert_cache.trace import TraceWriter
from moestro.kernels.cpu_experts import CpuShape, missing
from moestro.kernels.gpu.transfer import synchronize
from moestro.kv_cache.storage import KVStorage
from moestro.scheduler.filling import small_tokens
from moestro.scheduler.plan import SweepPlan, SweepRow

MOST_WORKERS = 16
# Prompt tokens whose sweeps use different kernels, and pieces that reach the second layer.
COMPILED = (1, 8, 48, 256, 700, 2048)
PIECES = 40
Progress = Callable[[str, int, int], None]  # stage, done, total


def build_executor(
    config: Config,
    decoder: Decoder,
    kv: KVStorage,
    store: ExpertStore,
    plan: MemoryPlan,
    policy: Policy,
    trace: TraceWriter | None,
    progress: Progress,
    scramble: bool,
    routing: RoutingSource | None,
) -> tuple[GpuExecutor, DeviceCache]:
    """Allocate, begin to fill the cache, compile the kernels and capture the graphs.

    What torch may take is limited to the plan from here on: running out fails a step, and never
    takes memory that was left to others.
    """
    spec, device = decoder.spec, kv.pool.device
    if device.type == "cuda":
        _limit_memory(config)
    layers, moe = len(spec.moe_layers), spec.moe
    cache = DeviceCache(
        store,
        layers,
        moe.experts,
        slots=plan.slots - plan.ring - plan.staging,
        ring=plan.ring,
        staging=plan.staging,
        host=plan.host_entries,
        policy=policy,
        device=device,
        workers=min(MOST_WORKERS, os.cpu_count() or 1),
        trace=trace,
    )
    rows = config.max_num_seqs
    cpu = _cpu_share(config, decoder, cache, rows)
    if cpu is not None:
        cache.share_with(cpu)
    cache.start_fill()
    cache.upload()
    blocks = -(-plan.max_model_len // plan.block_size) + 1
    forced = law = None
    if routing is not None:
        forced = torch.zeros(layers, rows, moe.top_k, dtype=torch.int32, device=device)
        if routing.law is not None:
            law = torch.tensor(routing.law, dtype=torch.float32, device=device)
    shared = Shared(
        decoder=decoder,
        norms=Norms(decoder),
        router=build_router(moe),
        cache=cache,
        kv=kv,
        given=StepInput(rows, device),
        sampled=torch.zeros(rows, dtype=torch.int64, device=device),
        tables=torch.zeros(rows, blocks + 1, dtype=torch.int32, device=device),
        logits=torch.zeros(rows, spec.vocab_size, dtype=torch.float32, device=device),
        inverse=decoder.inverse.to(device),
        cpu=None if cpu is None else cpu.link,
        timed=True,
        scramble=scramble,
        forced=forced,
        law=law,
    )
    tokens = config.max_sweep_tokens
    spaces = (
        Workspace(spec, small_tokens(tokens), decoder.dtype, device),
        Workspace(spec, tokens, decoder.dtype, device),
    )

    def compiled(stage: str, done: int, total: int) -> None:
        cache.fill(beside_work=False)  # the disk need not wait for the compiler
        progress(stage, done, total)

    _compile_sweeps(shared, spaces[1], partial(compiled, "sweep kernels"))
    graphs = Graphs(shared, rows, partial(compiled, "decode graphs"))
    sampler = DeviceSampler(spec.vocab_size, device, scramble=scramble)
    return GpuExecutor(shared, graphs, sampler, spaces, routing), cache


def _cpu_share(config: Config, decoder: Decoder, cache: DeviceCache, rows: int) -> CpuShare | None:
    """What computes misses in host memory; None where there will be none, or nothing that could."""
    device = cache.slab.device
    if cache.complete or config.cpu_experts == "off":
        return None
    if config.cpu_experts == "auto" and device.type != "cuda":
        return None  # in Triton's interpreter it would only take time from it
    moe, layout, dtype = decoder.spec.moe, cache.layout, decoder.dtype
    plain = layout.format is None and not layout.has_bias and isinstance(moe.activation, SwiGLU)
    reason = missing(dtype) if plain else "its kernels compute unpacked SwiGLU without biases only"
    if reason is not None:
        if config.cpu_experts == "on":
            raise ConfigError(f"--cpu-experts on: {reason}", param="cpu_experts")
        return None
    shape = CpuShape(decoder.spec.hidden, moe.intermediate, dtype, layout.part("down").offset)
    return CpuShare(
        shape,
        cache.arena,
        moe.experts,
        rows=rows,
        top_k=moe.top_k,
        threads=config.cpu_expert_threads,
        device=device,
    )


def _compile_sweeps(shared: Shared, space: Workspace, progress: Callable[[int, int], None]) -> None:
    """Run the first layers of sweeps of every size class, so that no request waits for a compiler.
    Nothing of it remains but what the kernels' cache keeps."""
    stream, vocab = ExpertStream(shared.cache), shared.spec.vocab_size
    sizes = [tokens for tokens in COMPILED if tokens < space.tokens] + [space.tokens]
    for number, tokens in enumerate(sizes):
        blocks = tuple(range(min(-(-tokens // shared.kv.block_size), len(shared.kv.pool))))
        length = min(tokens, len(blocks) * shared.kv.block_size)
        # Various tokens, so that they touch as many experts as a prompt does.
        made_up = tuple((7919 * place) % vocab for place in range(length))
        row = SweepRow("", made_up, 0, blocks, 0, samples=True)
        with torch.inference_mode():
            sweep = GpuSweep(SweepPlan(0, (row,)), shared, stream, space)
            for _ in range(PIECES):
                if sweep.advance():
                    break
            sweep.close()
        progress(number + 1, len(sizes))
    synchronize(shared.tables.device)
    shared.kv.pool.zero_()
    shared.cache.forget_counts()


def _limit_memory(config: Config) -> None:
    free, total = torch.cuda.mem_get_info()
    taken = torch.cuda.memory_reserved()
    budget = config.gpu_memory or int((free + taken) * (1 - MARGIN))
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, budget - OUTSIDE) / total))
