"""The engine's numbers as metric families. Owns: which snapshot field has which name.

Read at scrape time, so gauges are right when nothing runs; totals go through `Totals`, so they do
not go back when the engine process was restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from moestro.server.engine_port import READY, Engine
from moestro.server.histogram import Totals, add_buckets
from moestro.stats import EngineStats, ExpertStats, TierStats

LABELS = ("model_name", "engine")
Own = tuple[str, str]


def _kv_usage(stats: EngineStats) -> float:
    return stats.kv.blocks_used / stats.kv.blocks if stats.kv.blocks else 0.0


GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Sequences in the engine.", lambda s: s.scheduler.running),
    "num_requests_waiting": ("Sequences in the queue.", lambda s: s.scheduler.waiting),
    "num_requests_decoding": ("Sequences past their prompt.", lambda s: s.scheduler.decoding),
    "num_requests_sweeping": ("Sequences in a prompt sweep.", lambda s: s.scheduler.sweeping),
    "kv_cache_usage_perc": ("Share of KV blocks held by sequences, 0 to 1.", _kv_usage),
    "decode_step_seconds": ("Recent mean of a decode step.", lambda s: s.step_seconds),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prefix_cache_queries": ("Prompt tokens looked up.", lambda s: s.kv.prefix_queries),
    "prefix_cache_hits": ("Prompt tokens reused.", lambda s: s.kv.prefix_hits),
    "num_preemptions": ("Sequences preempted.", lambda s: s.scheduler.preemptions),
    "prompt_tokens": ("Prompt tokens of started sequences.", lambda s: s.scheduler.prompt_tokens),
    "generation_tokens": ("Tokens sampled.", lambda s: s.scheduler.generation_tokens),
    "decode_steps": ("Decode steps.", lambda s: s.scheduler.decode_steps),
    "sweeps": ("Prompt sweeps.", lambda s: s.scheduler.sweeps),
    "swept_tokens": ("Prompt tokens computed.", lambda s: s.scheduler.swept_tokens),
    "expert_hits": ("Wanted experts found in slots.", lambda s: s.experts.hits),
    "expert_misses": ("Wanted experts not in slots.", lambda s: s.experts.misses),
    "expert_evictions": ("Experts that left their slot.", lambda s: s.experts.evictions),
    "expert_cpu_computed": (
        "Misses that the CPU computed in host memory.",
        lambda s: s.experts.computed,
    ),
    "expert_staged": ("Misses served without a slot.", lambda s: s.experts.staged),
    "expert_exposed_fetch_seconds": (
        "Time that compute stood still for an expert.",
        lambda s: s.experts.exposed_seconds,
    ),
    "expert_prefetch_useful": ("Prefetched and used.", lambda s: s.experts.prefetch_useful),
    "expert_prefetch_wasted": ("Prefetched in vain.", lambda s: s.experts.prefetch_wasted),
}
TIERS: dict[str, Callable[[ExpertStats], TierStats]] = {
    "slots": lambda e: e.slots,
    "host": lambda e: e.host,
    "disk": lambda e: e.disk,
}


def engine_families(engine: Engine, prefix: str, own: Own, totals: Totals) -> Iterator[Metric]:
    """Yield the families that describe the engine."""
    stats = engine.snapshot
    totals.begin_life(engine.restarts)
    for name, (text, read) in GAUGES.items():
        gauge = GaugeMetricFamily(prefix + name, text, labels=LABELS)
        gauge.add_metric(own, read(stats))
        yield gauge
    for name, (text, read) in COUNTERS.items():
        counter = CounterMetricFamily(prefix + name, text, labels=LABELS)
        counter.add_metric(own, totals.of(name, read(stats)))
        yield counter
    yield _waiting_by_reason(stats, prefix, own)
    yield from _tiers(stats.experts, prefix, own, totals)
    yield _fetch_latency(stats.experts, prefix, own, totals)
    yield _cache_config(engine, stats, prefix, own)
    restarts = CounterMetricFamily(
        prefix + "engine_restarts", "Times the engine process was started again.", labels=LABELS
    )
    restarts.add_metric(own, engine.restarts)
    yield restarts
    ready = GaugeMetricFamily(prefix + "engine_ready", "1 when the engine serves.", labels=LABELS)
    ready.add_metric(own, float(engine.state == READY and not engine.stalled))
    yield ready


def _waiting_by_reason(stats: EngineStats, prefix: str, own: Own) -> Metric:
    family = GaugeMetricFamily(
        prefix + "num_requests_waiting_by_reason", "Queue by reason.", labels=(*LABELS, "reason")
    )
    family.add_metric((*own, "capacity"), stats.scheduler.waiting)
    family.add_metric((*own, "deferred"), 0)
    return family


def _tiers(experts: ExpertStats, prefix: str, own: Own, totals: Totals) -> Iterator[Metric]:
    labels = (*LABELS, "tier")
    moved = CounterMetricFamily(prefix + "expert_bytes", "Bytes read from a tier.", labels=labels)
    there = GaugeMetricFamily(prefix + "resident_experts", "Experts in a tier.", labels=labels)
    room = GaugeMetricFamily(
        prefix + "expert_capacity", "Experts a tier can hold; 0 = unbounded.", labels=labels
    )
    for name, read in TIERS.items():
        tier = read(experts)
        moved.add_metric((*own, name), totals.of(f"expert_bytes.{name}", tier.bytes_read))
        there.add_metric((*own, name), tier.resident)
        room.add_metric((*own, name), tier.capacity)
    yield from (moved, there, room)


def _fetch_latency(experts: ExpertStats, prefix: str, own: Own, totals: Totals) -> Metric:
    """`fetch_latency_buckets` holds a count for each bucket alone, keyed by its upper bound."""
    family = HistogramMetricFamily(
        prefix + "expert_fetch_latency_seconds", "Time of one expert fetch.", labels=LABELS
    )
    given = {float(bound): count for bound, count in experts.fetch_latency_buckets.items()}
    over = given.pop(float("inf"), 0)
    bounds = sorted(given)
    counts = [*(given[b] for b in bounds), over]
    kept = [
        int(totals.of(f"fetch_latency.{bound}", count))
        for bound, count in zip((*bounds, "inf"), counts, strict=True)
    ]
    add_buckets(family, own, bounds, kept, totals.of("fetch_seconds", experts.fetch_seconds))
    return family


def _cache_config(engine: Engine, stats: EngineStats, prefix: str, own: Own) -> Metric:
    names = ("block_size", "num_gpu_blocks", "expert_slots", "expert_policy")
    family = GaugeMetricFamily(
        prefix + "cache_config_info", "Sizes that hold, as labels.", labels=(*LABELS, *names)
    )
    slots = engine.info.expert_slots if engine.info is not None else 0
    values = (stats.kv.block_size, stats.kv.blocks, slots, stats.experts.policy)
    family.add_metric((*own, *map(str, values)), 1)
    return family
