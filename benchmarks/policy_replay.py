"""Replays of routing for the policy study: the same decisions as the server's, without bytes.

Owns: passes made of recorded or made-up sequences, and their replay by the CPU's rules and by the
GPU's. `residency`, `victims` and the policies are the server's own code.

**CPU**: each layer gives slots away when it misses; prompts run as sweeps between decode passes.
**GPU**: slots are given away by lists that were made while the pass before was still under way;
sweeps tell the cache nothing, so they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from moestro.expert_cache.policies.belady import optimal_hits
from moestro.expert_cache.policies.lru import Lru
from moestro.expert_cache.policy import Policy
from moestro.expert_cache.residency import STAGE, Residency
from moestro.expert_cache.slot_table import FREE
from moestro.expert_cache.trace import read_trace
from moestro.expert_cache.victims import Victims

Ids = npt.NDArray[np.int64]
Shape = tuple[int, int]  # layers, experts


@dataclass(frozen=True, slots=True)
class Stream:
    """One recorded sequence: routing of its prompt, [layers, tokens, top_k] or None, and of its
    decode passes, [tokens, layers, top_k]."""

    prompt: Ids | None
    decode: Ids


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the layers: ids [layers, rows, top_k]. A sweep's rows are of one sequence."""

    kind: Literal["decode", "sweep"]
    names: list[str]
    ids: Ids
    finished: list[str]


@dataclass(slots=True)
class Counts:
    """Hits and misses of decode passes: of all, and of the second half ("warm")."""

    hits: int = 0
    misses: int = 0
    warm_hits: int = 0
    warm_misses: int = 0

    def add(self, hits: int, misses: int, warm: bool) -> None:
        """Count a pass, or a part of one."""
        self.hits += hits
        self.misses += misses
        self.warm_hits += hits * warm
        self.warm_misses += misses * warm


class PlainLru(Lru):
    """LRU as textbooks have it: a working set that cannot fit flushes everything."""

    name = "plain_lru"
    steady = True  # only in that nobody protects its slots


def load(path: Path) -> tuple[Shape, list[Stream]]:
    """The sequences of a trace that was recorded one sequence at a time."""
    trace = read_trace(path)
    prompts: dict[int, list[list[Ids]]] = {}
    decodes: dict[int, list[Ids]] = {}
    layers = trace.header.layers
    for step in trace:
        if not step.routes:
            continue
        owner = int(step.routes[0].sequences[0])
        if step.kind == "sweep":
            parts = prompts.setdefault(owner, [[] for _ in range(layers)])
            for route in step.routes:
                parts[route.layer].append(route.ids)
        else:
            decodes.setdefault(owner, []).append(np.stack([route.ids[0] for route in step.routes]))
    made = []
    for owner, parts in sorted(prompts.items()):
        prompt = np.stack([np.concatenate(part) for part in parts])
        tokens = decodes.get(owner)
        decode = np.stack(tokens) if tokens else np.zeros((0, layers, trace.header.top_k), np.int64)
        made.append(Stream(prompt, decode))
    return (layers, trace.header.experts), made


def passes(sequences: Sequence[Stream], streams: int, most: int) -> list[Pass]:
    """`streams` sequences at a time, the next when one ends, until too few are left to fill three
    quarters of the batch, or `most` decode passes have been made."""
    made: list[Pass] = []
    running: dict[int, int] = {}  # sequence -> its next token
    waiting, decoded = 0, 0
    while decoded < most:
        while waiting < len(sequences) and len(running) < streams:
            new = sequences[waiting]
            if new.prompt is not None:
                made.append(Pass("sweep", [str(waiting)], new.prompt, []))
            if len(new.decode):
                running[waiting] = 0
            waiting += 1
        if 4 * len(running) < 3 * streams:
            break
        ids = np.stack([sequences[n].decode[at] for n, at in running.items()], axis=1)
        ended = [n for n, at in running.items() if at + 1 == len(sequences[n].decode)]
        made.append(Pass("decode", [str(n) for n in running], ids, [str(n) for n in ended]))
        running = {n: at + 1 for n, at in running.items() if n not in ended}
        decoded += 1
    return made


def decodes(steps: Sequence[Pass]) -> list[Pass]:
    """Without the sweeps."""
    return [step for step in steps if step.kind == "decode"]


def _half(steps: Sequence[Pass]) -> int:
    """Index of the pass where the second half of the decode passes begins."""
    places = [place for place, step in enumerate(steps) if step.kind == "decode"]
    return places[len(places) // 2] if places else 0


def best(shape: Shape, steps: Sequence[Pass], slots: int) -> Counts:
    """Belady's optimum, which may also refuse to keep what was fetched."""
    offset = np.arange(shape[0]) * shape[1]
    wanted = [
        (np.unique(ids) + offset[layer]).tolist()
        for step in steps
        for layer, ids in enumerate(step.ids)
    ]
    hits = np.array(optimal_hits(wanted, slots)).reshape(len(steps), -1).sum(1).tolist()
    sizes = np.array([len(keys) for keys in wanted]).reshape(len(steps), -1).sum(1).tolist()
    counts, half = Counts(), _half(steps)
    for place, step in enumerate(steps):
        if step.kind == "decode":
            counts.add(hits[place], sizes[place] - hits[place], place >= half)
    return counts


def on_cpu(shape: Shape, steps: Sequence[Pass], slots: int, policy: Policy) -> Counts:
    """What `ExpertCache` would hit."""
    residency = Residency(*shape, slots, 0, policy)
    counts, half = Counts(), _half(steps)
    for place, step in enumerate(steps):
        residency.begin_pass(step.kind)
        rows = np.arange(step.ids.shape[1]) * (step.kind == "decode")
        for layer, ids in enumerate(step.ids):
            if policy.wants_sequences:
                policy.observe(step.names, layer, ids, rows)
            hits, misses = _serve(residency, layer, np.bincount(ids.ravel(), minlength=shape[1]))
            if step.kind == "decode":
                counts.add(hits, misses, place >= half)
        for name in step.finished:
            policy.finish(name)
    return counts


def _serve(residency: Residency, layer: int, tokens: Ids) -> tuple[int, int]:
    wanted, slots = residency.want(layer, tokens, None)
    hit = slots >= 0
    held, missing = slots[hit], wanted[~hit]
    if len(missing):
        residency.table.pin(held)
        for place in residency.place(layer, missing, tokens):
            if place.slot != STAGE:
                residency.table.bind(place.slot, place.key)
        residency.table.unpin(held)
    return len(held), len(missing)


def on_gpu(shape: Shape, steps: Sequence[Pass], slots: int, policy: Policy) -> Counts:
    """What the tables on the device would hit, when each step is launched before the one before
    it has been read, and refused experts go through the ring."""
    residency = Residency(*shape, slots, 0, policy)
    victims = Victims(residency)
    offset = (np.arange(shape[0]) * shape[1])[:, None, None]
    device = _Device(shape, slots)
    counts, half = Counts(), _half(steps)
    flying: tuple[Pass, list[int], list[int]] | None = None
    missed = kept = 0
    for place, step in enumerate(steps):
        order, admit = victims.lists(missed, kept)
        hits, misses, keys, at = device.step(step.ids, order.tolist(), admit.tolist())
        counts.add(hits, misses, place >= half)
        if flying is not None:
            before, came, where = flying
            kept = len(came)
            residency.begin_pass("decode")
            if policy.wants_sequences:
                policy.observe_pass(before.names, before.ids)
            keys_used = (before.ids + offset).ravel()
            residency.want_all(np.bincount(keys_used, minlength=shape[0] * shape[1]))
            residency.table.replace(np.array(came, np.int64), np.array(where, np.int64))
            for name in before.finished:
                policy.finish(name)
        flying, missed = (step, keys, at), misses
    return counts


class _Device:
    """Tables as `kernels.gpu.acquire` changes them, with a ring that never overflows."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self._experts = shape[1]
        self.slot_of = np.full(shape[0] * shape[1], FREE)
        self.owner = [FREE] * slots

    def step(
        self, ids: Ids, victims: list[int], admit: list[bool]
    ) -> tuple[int, int, list[int], list[int]]:
        """Hits and misses of one pass, and which keys came into which slots."""
        hits = misses = cursor = 0
        keys: list[int] = []
        slots: list[int] = []
        for layer, routed in enumerate(ids):
            wanted = np.unique(routed) + layer * self._experts
            missing = wanted[self.slot_of[wanted] < 0].tolist()
            hits += len(wanted) - len(missing)
            misses += len(missing)
            needed = set(wanted.tolist())
            spare = (  # from the cursor on, and around the end
                (cursor + step, victims[(cursor + step) % len(victims)])
                for step in range(len(victims))
            )
            usable = ((place, slot) for place, slot in spare if self.owner[slot] not in needed)
            taken = list(zip((key for key in missing if admit[key]), usable, strict=False))
            for key, (place, slot) in taken:
                if self.owner[slot] >= 0:
                    self.slot_of[self.owner[slot]] = FREE
                self.owner[slot], self.slot_of[key] = key, slot
                keys.append(key)
                slots.append(slot)
                cursor = (place + 1) % len(victims)
        return hits, misses, keys, slots
