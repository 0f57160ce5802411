"""Regroups a trace: the same sequences, decoded another number at a time.

Owns: splitting steps by sequence and joining them again. No torch. What a batch wants is the
union of what its sequences want, so a trace of single requests says what a crowd would do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from moestro.errors import ConfigError
from moestro.expert_cache.trace import NO_SEQUENCE, Route, Step

_Lines = dict[int, deque[Step]]


def rebatch(steps: Iterable[Step], batch: int) -> Iterator[Step]:
    """Steps of `batch` sequences at a time; when one ends, the next in order takes its place.

    A sequence's prompt is a sweep of its own, just before its first decode step. Rows of unknown
    sequence are taken to belong to one endless sequence for each row number.
    """
    if batch < 1:
        raise ConfigError(f"batch is {batch}; at least 1 sequence is needed", param="--batch")
    lines = _by_sequence(steps)
    waiting = deque(lines)
    running: list[int] = []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.popleft())
        for sequence in running:
            while lines[sequence] and lines[sequence][0].kind == "sweep":
                yield lines[sequence].popleft()
        step = _join([lines[sequence].popleft() for sequence in running if lines[sequence]])
        step.finished = [sequence for sequence in running if not lines[sequence]]
        running = [sequence for sequence in running if lines[sequence]]
        yield step


def _by_sequence(steps: Iterable[Step]) -> _Lines:
    lines: _Lines = {}
    for step in steps:
        opened: set[int] = set()
        for route in step.routes:
            rows = -2 - np.arange(len(route.ids))  # names for rows without a sequence
            owners = np.where(route.sequences == NO_SEQUENCE, rows, route.sequences)
            for sequence in dict.fromkeys(owners.tolist()):
                mine = owners == sequence
                line = lines.setdefault(sequence, deque())
                if sequence not in opened:
                    opened.add(sequence)
                    if not (step.resumed and _goes_on(line, route.layer)):
                        line.append(Step(step.kind, int(mine.sum())))
                line[-1].routes.append(Route(route.layer, route.ids[mine], owners[mine]))
    return lines


def _goes_on(line: deque[Step], layer: int) -> bool:
    """Whether the last step of a sequence is a sweep that has not come to `layer` yet."""
    return bool(line) and line[-1].kind == "sweep" and line[-1].routes[-1].layer < layer


def _join(steps: list[Step]) -> Step:
    by_layer: dict[int, list[Route]] = {}
    for step in steps:
        for route in step.routes:
            by_layer.setdefault(route.layer, []).append(route)
    routes = [
        Route(
            layer,
            np.concatenate([route.ids for route in parts]),
            np.concatenate([route.sequences for route in parts]),
        )
        for layer, parts in sorted(by_layer.items())
    ]
    return Step("decode", sum(step.rows for step in steps), False, routes)
