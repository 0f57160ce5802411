"""Joins the parts into an engine. The only place that knows them all.

Owns: the order of construction, so that a wrong flag or a damaged checkpoint is found before
anything large is allocated.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moestro.config import Config
from moestro.engine import engine
from moestro.engine.decoder import Decoder
from moestro.engine.executor import Executor
from moestro.engine.expert_files import expert_sources
from moestro.engine.expert_policy import PolicyKeeper
from moestro.engine.grammars import Grammars
from moestro.engine.memory import MemoryPlan, free_memory, plan_memory
from moestro.engine.messages import EngineInfo
from moestro.engine.model_files import ModelFiles, open_files
from moestro.engine.models.hf_config import read_json
from moestro.engine.models.registry import load_spec
from moestro.engine.models.spec import ModelSpec
from moestro.engine.scramble import ScramblingSampler
from moestro.engine.synthetic import Synthetic
from moestro.engine.weights import check_tensors, dummy_dense, load_dense
from moestro.errors import ConfigError
from moestro.expert_cache.cache import ExpertCache
from moestro.expert_cache.layout import ExpertLayout
from moestro.expert_cache.policy import Policy
from moestro.expert_cache.store import ExpertStore
from moestro.expert_cache.trace import TraceWriter
from moestro.grammar.vocabulary import Vocabulary
from moestro.kernels import registry
from moestro.kv_cache.manager import KVManager
from moestro.kv_cache.storage import KVStorage
from moestro.scheduler.limits import Limits
from moestro.scheduler.pace import GAP_STEPS, GAP_STEPS_ON_GPU
from moestro.scheduler.scheduler import Scheduler

Progress = Callable[[str, int, int], None]  # stage, done, total


def _silent(stage: str, done: int, total: int) -> None:
    pass


def build_engine(
    config: Config,
    model_path: Path,
    progress: Progress = _silent,
    synthetic: Synthetic | None = None,
) -> engine.Engine:
    """Load the model in `model_path` and return an engine that is ready to serve. Experts come to
    memory while it serves; `Engine.finish_fill` waits for them.

    `synthetic`: what a benchmark makes up in place of the model's own routing and tokens.
    """
    kind = device(config)
    spec = load_spec(model_path)
    made_up = synthetic or Synthetic()
    routing = made_up.source(len(spec.moe_layers), spec.moe.experts, spec.moe.top_k)
    files = open_files(config, spec, model_path)
    layout = files.layout(compute_dtype(spec, config))
    plan = _plan(kind, files, layout, config)
    threads = _threads(config)
    torch.set_num_threads(threads)
    decoder, store = _load(config, kind, files, layout, plan.max_model_len, progress)
    kv = KVStorage(plan.groups, plan.blocks, decoder.dtype, kind)
    trace = _trace(config, spec, layout, model_path)
    policies = PolicyKeeper(config, len(spec.moe_layers), spec.moe.experts, model_path)
    policy = policies.policy
    closing = [policies.save]
    manager = KVManager(
        plan.block_size,
        plan.blocks,
        prefix_caching=config.enable_prefix_caching,
        groups=plan.groups,
        run=config.max_sweep_tokens,
    )
    limits = Limits(
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_queued=config.max_num_queued,
        vocab_size=spec.vocab_size,
        kv_tokens=plan.kv_tokens,
        max_sweep_tokens=config.max_sweep_tokens,
    )
    pace = GAP_STEPS_ON_GPU if runs_kernels(kind) else GAP_STEPS
    scheduler = Scheduler(limits, manager, pace)
    executor: engine.Executor
    cache: engine.Cache
    notes: tuple[str, ...] = ()
    if runs_kernels(kind):
        from moestro.engine.gpu.build import build_executor

        executor, device_cache = build_executor(
            config, decoder, kv, store, plan, policy, trace, progress, made_up.scramble, routing
        )
        cache, notes = device_cache, device_cache.notes
    else:
        decoder.routing = routing
        cpu_cache = _cache(spec, plan, store, policy, trace)
        sampler = ScramblingSampler(spec.vocab_size) if made_up.scramble else None
        executor, cache = Executor(decoder, kv, cpu_cache, threads, sampler), cpu_cache
    if trace is not None:
        closing.append(trace.close)
    vocabulary = Vocabulary(
        model_path, size=spec.vocab_size, eos_token_ids=eos_token_ids(model_path)
    )
    grammars = Grammars(vocabulary)
    closing.append(grammars.close)
    info = _info(plan, spec, model_path, files.notes() + notes)
    return engine.Engine(
        scheduler,
        executor,
        cache,
        manager,
        info=info,
        closing=closing,
        policies=policies,
        grammars=grammars,
    )


def describe(config: Config, model_path: Path) -> dict[str, Any]:
    """What `moestro check` prints: memory plan, notes and kernels. Allocates nothing."""
    kind = device(config)
    spec = load_spec(model_path)
    files = open_files(config, spec, model_path)
    layout = files.layout(compute_dtype(spec, config))
    if files.checkpoint is not None:
        expert_sources(files.checkpoint, spec, files.packed if files.format else None)
        check_tensors(files.checkpoint, spec, files.packed)
    plan = _plan(kind, files, layout, config)
    return {
        "family": spec.family,
        "memory": plan.table(),
        "slots": plan.slots,
        "experts": plan.experts,
        "kv_tokens": plan.kv_tokens,
        "max_model_len": plan.max_model_len,
        "notes": plan.notes + files.notes(),
        "kernels": registry.explain(
            kind,
            getattr(torch, layout.dtype),
            _threads(config),
            layout.format.name if layout.format is not None else None,
        ),
    }


def device(config: Config) -> str:
    """The device to run on: "cuda" or "cpu". ConfigError when CUDA was asked for and lacks."""
    lacking = cuda_lacks()
    if config.device == "cuda" and lacking is not None:
        raise ConfigError(f"--device cuda: {lacking}", param="device")
    return "cpu" if config.device == "cpu" or lacking is not None else "cuda"


def runs_kernels(kind: str) -> bool:
    """Whether `engine.gpu` serves this kind of device. Tests say yes to a CPU, where Triton's
    interpreter runs the kernels."""
    return kind == "cuda"


def _threads(config: Config) -> int:
    """Threads that compute on the CPU: a core is left to the server."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) - 1)


def cuda_lacks() -> str | None:
    """Why nothing can run on a GPU here; None when it can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'moestro[cuda]'"
    return None


def compute_dtype(spec: ModelSpec, config: Config) -> str:
    """Without --dtype float32 on a CPU, on a GPU the checkpoint's own."""
    own = spec.dtype if device(config) == "cuda" else "float32"
    return own if config.dtype == "auto" else config.dtype


def eos_token_ids(model_path: Path) -> tuple[int, ...]:
    """All end-of-sequence ids that config.json and generation_config.json name."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (model_path / name).exists():
            ids = read_json(model_path / name).get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))


def _plan(kind: str, files: ModelFiles, layout: ExpertLayout, config: Config) -> MemoryPlan:
    spec, dense = files.spec, files.dense_bytes(layout.dtype)
    if runs_kernels(kind):
        from moestro.engine.gpu.blocks import check_blocks, check_format
        from moestro.engine.gpu.memory import plan_gpu_memory

        check_blocks(spec)
        check_format(layout)
        free = torch.cuda.mem_get_info()[0] if kind == "cuda" else free_memory()
        return plan_gpu_memory(spec, layout, config, free, free_memory(), dense)
    return plan_memory(spec, layout, config, free_memory(), dense=dense)


def _load(
    config: Config,
    kind: str,
    files: ModelFiles,
    layout: ExpertLayout,
    longest: int,
    progress: Progress,
) -> tuple[Decoder, ExpertStore]:
    spec, dtype = files.spec, getattr(torch, layout.dtype)
    store = files.store(layout, config.seed, direct=kind == "cuda")
    if files.checkpoint is None:
        weights = dummy_dense(spec, dtype, config.seed, kind)
        return Decoder(spec, weights, longest), store
    check_tensors(files.checkpoint, spec, files.packed)

    def counted(done: int, total: int) -> None:
        progress("dense weights", done, total)

    weights = load_dense(files.checkpoint, spec, dtype, counted, kind, files.packed)
    return Decoder(spec, weights, longest), store


def _cache(
    spec: ModelSpec,
    plan: MemoryPlan,
    store: ExpertStore,
    policy: Policy,
    trace: TraceWriter | None,
) -> ExpertCache:
    layers, experts = len(spec.moe_layers), spec.moe.experts
    cache = ExpertCache(
        store,
        layers,
        experts,
        slots=plan.slots,
        staging=plan.staging,
        host=plan.host_entries,
        policy=policy,
        trace=trace,
    )
    cache.start_fill()
    return cache


def _trace(
    config: Config, spec: ModelSpec, layout: ExpertLayout, model: Path
) -> TraceWriter | None:
    if config.trace is None:
        return None
    layers, moe, name = len(spec.moe_layers), spec.moe, model.resolve().name
    size = layout.nbytes
    return TraceWriter(config.trace, layers, moe.experts, moe.top_k, name, expert_bytes=size)


def _info(plan: MemoryPlan, spec: ModelSpec, path: Path, notes: tuple[str, ...]) -> EngineInfo:
    return EngineInfo(
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        kv_tokens=plan.kv_tokens,
        block_size=plan.block_size,
        eos_token_ids=eos_token_ids(path),
        memory=plan.table(),
        expert_slots=plan.slots,
        experts=plan.experts,
        notes=plan.notes + notes,
    )
