"""Counters and snapshots. Each number has one owner, which fills its part; nobody else writes it.

Owns: the shape of what can be seen from outside. `server.prometheus` and `/admin/stats` render it.
All counters are totals since start; all times are seconds, all sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerStats:
    """Owned by `scheduler.Scheduler`."""

    running: int = 0  # sequences being decoded or swept
    decoding: int = 0
    sweeping: int = 0
    waiting: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by types.Finish value
    prompt_tokens: int = 0  # of started prompts, reused ones included, recomputation not
    generation_tokens: int = 0
    decode_steps: int = 0
    sweeps: int = 0
    swept_tokens: int = 0  # prompt tokens really computed, recomputation included


@dataclass(slots=True)
class KVStats:
    """Owned by `kv_cache.KVManager`."""

    block_size: int = 0
    blocks: int = 0
    blocks_used: int = 0  # held by a sequence
    blocks_cached: int = 0  # free, but with reusable content
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens reused


@dataclass(slots=True)
class TierStats:
    """One tier of expert memory."""

    capacity: int = 0  # experts; 0 = unbounded (disk)
    resident: int = 0  # experts
    hits: int = 0  # wanted experts served from here
    bytes_read: int = 0  # moved out of this tier towards compute


@dataclass(slots=True)
class LayerExpertStats:
    """One MoE layer."""

    layer: int = 0
    resident: int = 0  # experts in slots
    hits: int = 0
    misses: int = 0
    bytes_fetched: int = 0
    exposed_seconds: float = 0.0


@dataclass(slots=True)
class FillStats:
    """Owned by `expert_cache.Fill`. Slots and host memory fill while requests are served."""

    active: bool = False
    total: int = 0  # experts that slots and host memory hold together
    resident: int = 0  # experts that are in either now
    failed: int = 0  # experts that could not be read; who needs one tries again
    locked_bytes: int = 0  # of host memory, page-locked so far: a GPU reads it by itself


@dataclass(slots=True)
class ExpertStats:
    """Owned by `expert_cache.ExpertCache`. hits + misses = wanted experts, counted once per use."""

    policy: str = ""
    expert_bytes: int = 0  # one blob
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    staged: int = 0  # misses served through the staging ring, not admitted
    computed: int = 0  # misses that the CPU computed where they lay
    exposed_seconds: float = 0.0
    fetch_seconds: float = 0.0  # sum over fetches, overlapped or not
    fetches: int = 0
    prefetch_useful: int = 0
    prefetch_wasted: int = 0
    slots: TierStats = field(default_factory=TierStats)
    host: TierStats = field(default_factory=TierStats)
    disk: TierStats = field(default_factory=TierStats)
    fill: FillStats = field(default_factory=FillStats)
    layers: list[LayerExpertStats] = field(default_factory=list)
    fetch_latency_buckets: dict[str, int] = field(default_factory=dict)  # upper bound in s -> count


@dataclass(slots=True)
class EngineStats:
    """Everything, as one snapshot."""

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    kv: KVStats = field(default_factory=KVStats)
    experts: ExpertStats = field(default_factory=ExpertStats)
    step_seconds: float = 0.0  # recent mean of a decode step
    step_tokens: list[int] = field(default_factory=list)  # tokens of steps since the last snapshot
    uptime: float = 0.0
