"""Replays traces: what would another policy, size or batch have done?

Owns: counting hits. Decisions are made by the same `residency` that the cache uses. No torch, no
GPU. Slots here are cache slots: staging slots keep nothing from one layer to the next and are not
counted. A trace has no gate probabilities, so `score` runs here without that term, and `pinned`
is given the most used experts of the whole trace, in hindsight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moestro.errors import ConfigError
from moestro.expert_cache.policies import POLICIES, make_policy
from moestro.expert_cache.policies.belady import optimal_hits
from moestro.expert_cache.policy import Ints
from moestro.expert_cache.rebatch import rebatch
from moestro.expert_cache.residency import STAGE, Residency
from moestro.expert_cache.trace import Header, Route, Step

BELADY = "belady"  # the optimum; it needs the future and cannot serve
NAMES = (*POLICIES, BELADY)


class Recording(Protocol):
    """A trace, or anything that can be iterated like one, more than once."""

    @property
    def header(self) -> Header:
        """What was recorded."""

    def __iter__(self) -> Any:
        """Steps, from the beginning."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A recording in memory."""

    header: Header
    steps: Sequence[Step]

    def __iter__(self) -> Any:
        return iter(self.steps)


@dataclass(frozen=True, slots=True)
class Report:
    """One replay. hits + misses = wanted experts; every miss is taken to be waited for."""

    policy: str
    slots: int
    experts: int  # in all layers together
    batch: int | None  # None: as recorded
    hits: int
    misses: int
    decode_hits: int
    decode_misses: int
    evictions: int
    staged: int
    hits_per_layer: tuple[int, ...]
    misses_per_layer: tuple[int, ...]
    bytes: int  # over the link; 0 when the size of an expert is unknown
    exposed_seconds: float

    @property
    def hit_rate(self) -> float:
        """Hits of all wanted experts."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def decode_hit_rate(self) -> float:
        """The same, in decode steps only."""
        return self.decode_hits / max(1, self.decode_hits + self.decode_misses)


class _Tally:
    def __init__(self, layers: int) -> None:
        self.hits = [0] * layers
        self.misses = [0] * layers
        self.decode_hits = self.decode_misses = 0
        self.evictions = self.staged = 0

    def add(self, step: Step, layer: int, hits: int, misses: int) -> None:
        self.hits[layer] += hits
        self.misses[layer] += misses
        if step.kind == "decode":
            self.decode_hits += hits
            self.decode_misses += misses


def replay(
    trace: Recording,
    policy_name: str,
    slots: int,
    *,
    batch: int | None = None,
    link_bytes_per_second: float,
    expert_bytes: int,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Run a trace against one policy (or `belady`) with `slots` cache slots."""
    if not link_bytes_per_second > 0:
        raise ConfigError(
            f"a link of {link_bytes_per_second} bytes/s moves nothing", param="--link"
        )
    if batch is not None:
        trace = Steps(trace.header, list(rebatch(trace, batch)))
    head = trace.header
    if policy_name == BELADY:
        tally = _optimum(trace, slots)
    else:
        if policy_name == "pinned" and not options:
            options = {"hot": _most_used(trace, slots)}
        policy = make_policy(policy_name, head.layers, head.experts, options)
        tally = _run(trace, Residency(head.layers, head.experts, slots, 0, policy))
    moved = sum(tally.misses) * expert_bytes
    return Report(
        policy=policy_name,
        slots=slots,
        experts=head.layers * head.experts,
        batch=batch,
        hits=sum(tally.hits),
        misses=sum(tally.misses),
        decode_hits=tally.decode_hits,
        decode_misses=tally.decode_misses,
        evictions=tally.evictions,
        staged=tally.staged,
        hits_per_layer=tuple(tally.hits),
        misses_per_layer=tuple(tally.misses),
        bytes=moved,
        exposed_seconds=moved / link_bytes_per_second,
    )


def _run(trace: Recording, residency: Residency) -> _Tally:
    tally = _Tally(residency.layers)
    policy = residency.policy
    for step in trace:
        residency.begin_pass(step.kind, resumed=step.resumed)
        for route in step.routes:
            if policy.wants_sequences:
                names, rows = np.unique(route.sequences, return_inverse=True)
                policy.observe([str(name) for name in names], route.layer, route.ids, rows)
            hits, misses = _serve(residency, route, tally)
            tally.add(step, route.layer, hits, misses)
        for sequence in step.finished:
            policy.finish(str(sequence))
    tally.evictions = residency.evictions
    residency.table.check()
    return tally


def _serve(residency: Residency, route: Route, tally: _Tally) -> tuple[int, int]:
    """What `ExpertCache.acquire` and its lease do to the tables, without the bytes."""
    counts = np.bincount(route.ids.ravel(), minlength=residency.experts)
    wanted, slots = residency.want(route.layer, counts, None)
    hit = slots >= 0
    held, missing = slots[hit], wanted[~hit]
    if len(missing):
        residency.table.pin(held)
        for place in residency.place(route.layer, missing, counts):
            if place.slot == STAGE:
                tally.staged += 1
            else:
                residency.table.bind(place.slot, place.key)
        residency.table.unpin(held)
    return len(held), len(missing)


def _wanted(route: Route, experts: int) -> Ints:
    return np.unique(route.ids) + route.layer * experts


def _optimum(trace: Recording, slots: int) -> _Tally:
    head = trace.header
    tally = _Tally(head.layers)
    routes = [(step, route) for step in trace for route in step.routes]
    wanted = [_wanted(route, head.experts).tolist() for _, route in routes]
    for (step, route), keys, hits in zip(routes, wanted, optimal_hits(wanted, slots), strict=True):
        tally.add(step, route.layer, hits, len(keys) - hits)
    return tally


def _most_used(trace: Recording, slots: int) -> list[int]:
    uses: Counter[int] = Counter()
    for step in trace:
        for route in step.routes:
            uses.update(_wanted(route, trace.header.experts).tolist())
    return [key for key, _ in uses.most_common(slots)]
