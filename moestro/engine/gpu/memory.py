"""How a GPU's memory is split, by arithmetic alone.

Owns: the sizes of what only a GPU has (workspace of sweeps, buffers of graphs, ring, staging). Does
not own: KV blocks and the host arena, which are planned as on a CPU (`engine.memory`).
"""

from __future__ import annotations

import dataclasses

from moestro.config import Config
from moestro.engine.gpu.buffers import buckets
from moestro.engine.gpu.mlp import Mlp
from moestro.engine.gpu.workspace import Workspace
from moestro.engine.memory import MemoryPlan, plan_memory
from moestro.engine.models.spec import ModelSpec
from moestro.errors import ConfigError, OutOfMemory
from moestro.expert_cache.layout import DTYPE_BYTES, ExpertLayout
from moestro.expert_cache.stream import GROUPS
from moestro.scheduler.filling import small_tokens

OUTSIDE = 500 << 20  # bytes of CUDA's context and the kernels, which torch does not count
CONTEXT = OUTSIDE + (200 << 20)  # and what its libraries and graphs take through torch
MARGIN = 0.03  # of what is free: left alone when --gpu-memory is not given
MOST_GROUP = 8  # experts that a sweep brings together
RING_SHARE = 6  # one slot in so many is for what a decode step must not keep
STAGING_SHARE = 48
LEAST_ARENA = 64  # host entries: what is read from disk at a time


def plan_gpu_memory(
    spec: ModelSpec,
    layout: ExpertLayout,
    config: Config,
    free: int,
    free_host: int,
    dense: int | None = None,
) -> MemoryPlan:
    """Split `free` bytes of the device and `free_host` of the host. OutOfMemory says what lacks.
    `dense` as in `plan_memory`."""
    budget = config.gpu_memory or int(free * (1 - MARGIN))
    if budget > free:
        raise OutOfMemory(
            f"--gpu-memory is {budget:,} bytes, but only {free:,} are free on the device",
            param="gpu_memory",
        )
    workspace = gpu_workspace_bytes(spec, config, DTYPE_BYTES[layout.dtype])
    plan = plan_memory(
        spec,
        layout,
        config.model_copy(update={"gpu_memory": budget}),
        free,
        workspace=workspace,
        free_host=free_host,
        all_slots=len(spec.moe_layers) * spec.moe.experts,
        windows=False,
        dense=dense,
    )
    ring, staging = _apart(spec, config, plan)
    least = 0 if config.host_memory is not None else min(plan.experts, LEAST_ARENA)
    host = max(plan.host_entries, least)
    return dataclasses.replace(
        plan, ring=ring, staging=staging, host_entries=host, host_bytes=host * layout.nbytes
    )


def gpu_workspace_bytes(spec: ModelSpec, config: Config, size: int) -> int:
    """Bytes of everything that is neither weights, KV nor slots."""
    tokens = config.max_sweep_tokens
    sweeps = Workspace.nbytes(spec, tokens, size)
    sweeps += Workspace.nbytes(spec, small_tokens(tokens), size)
    moe, attention = spec.moe, spec.attention
    row = (3 * spec.hidden + 3 * attention.heads * attention.head_dim) * size
    row += moe.top_k * (spec.hidden + moe.intermediate) * size
    row += 64 * attention.heads * attention.head_dim * 4  # partial attention
    if moe.wide:
        row += (spec.hidden + moe.experts) * 4
    sizes = buckets(config.max_num_seqs)
    steps = sum(sizes) * row + sum(Mlp.nbytes(spec, rows, size) for rows in sizes)
    logits = 3 * config.max_num_seqs * spec.vocab_size * 4
    return CONTEXT + sweeps + steps + logits


def _apart(spec: ModelSpec, config: Config, plan: MemoryPlan) -> tuple[int, int]:
    """Slots of the ring and of staging, out of the plan's."""
    if plan.slots >= plan.experts:  # nothing ever has to be fetched
        return 0, 0
    staging = GROUPS * min(MOST_GROUP, max(1, plan.slots // STAGING_SHARE))
    at_once = min(spec.moe.experts, config.max_num_seqs * spec.moe.top_k)
    ring = min(at_once, max(1, (plan.slots - staging) // RING_SHARE))
    if plan.slots - staging < at_once:
        raise ConfigError(
            f"{plan.slots} expert slots, {staging} of them for sweeps, are fewer than the "
            f"{at_once} experts that one layer of a step may need; raise --gpu-memory or "
            f"--expert-slots, or lower --max-num-seqs ({config.max_num_seqs})",
            param="expert_slots",
        )
    return ring, staging
