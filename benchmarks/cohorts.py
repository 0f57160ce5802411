"""Would it pay to decode the running sequences in groups, some passes each?

    python -m benchmarks.cohorts

Replays 16 running sequences of the held-out traces and of the synthetic routers, all in each pass
or in groups ("cohorts") that decode a number of passes before the next group's turn. `similar`
groups by the experts of each sequence's last tokens, most alike together, anew for each round;
otherwise groups follow arrival. A pass is modelled as 3 ms + 0.1 ms a row + the time of its misses,
for 48 layers with experts of 9.4 MB over 51 GB/s. Printed are tokens/s and the longest pause
between two tokens of a sequence: rounds are strict, so nobody waits longer than the turns of all
other groups.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.policy_replay import Pass, Shape, Stream, load, on_cpu
from benchmarks.policy_study import EXPERT_BYTES, LINK, MODEL_LAYERS, make
from benchmarks.record_traces import KINDS, unpack
from benchmarks.synthetic_routers import LAYERS, ROUTERS

RUNNING, PASSES, RECENT = 16, 300, 32
PASS_SECONDS, ROW_SECONDS = 3e-3, 1e-4
PLANS = (
    (16, 1, False),
    (8, 16, False),
    (8, 16, True),
    (4, 16, False),
    (4, 16, True),
    (4, 64, True),
)
PLANS += ((2, 64, True), (1, 64, False))


class Running:
    """The sequences that run, each with the rest of its tokens."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._waiting = [stream.decode for stream in streams if len(stream.decode)]
        self._left = {n: self._waiting.pop(0) for n in range(RUNNING)}
        self._past = {n: rest[:1] for n, rest in self._left.items()}
        self._generation = dict.fromkeys(self._left, 0)

    def step(self, group: Sequence[int]) -> Pass | None:
        """The next pass of a group; None when sequences run out."""
        ids = np.stack([self._left[n][0] for n in group], axis=1)
        names = [f"{n}.{self._generation[n]}" for n in group]
        finished = []
        for name, n in zip(names, group, strict=True):
            self._past[n] = np.concatenate((self._past[n], self._left[n][:1]))[-RECENT:]
            self._left[n] = self._left[n][1:]
            if not len(self._left[n]):
                finished.append(name)
                if not self._waiting:
                    return None
                self._left[n] = self._waiting.pop(0)
                self._past[n] = self._left[n][:1]
                self._generation[n] += 1
        return Pass("decode", names, ids, finished)

    def groups(self, size: int, experts: int, similar: bool) -> Iterator[list[int]]:
        """All sequences in groups; `similar`: each is filled with those most like its first."""
        left = list(self._left)
        if similar:
            uses = np.stack([self._use(n, experts) for n in left])
        while left:
            group = left[:size]
            if similar:
                likeness = uses[left] @ uses[left[0]]
                group = [left[place] for place in np.argsort(-likeness, kind="stable")[:size]]
            yield group
            left = [n for n in left if n not in group]

    def _use(self, n: int, experts: int) -> np.ndarray:
        past = self._past[n]
        keys = past + np.arange(past.shape[1])[None, :, None] * experts
        counts = np.bincount(keys.ravel(), minlength=past.shape[1] * experts).astype(float)
        return counts / np.linalg.norm(counts)


def schedule(
    streams: Sequence[Stream], experts: int, size: int, turn: int, similar: bool
) -> list[Pass]:
    """Passes of all rounds, until as many tokens are made as `PASSES` passes of all would make."""
    running, made, tokens = Running(streams), [], 0
    while True:
        for group in running.groups(size, experts, similar):
            for _ in range(turn):
                step = running.step(group)
                if step is None or tokens >= PASSES * RUNNING:
                    return made
                made.append(step)
                tokens += len(group)


def judge(shape: Shape, steps: Sequence[Pass], slots: int, size: int, turn: int) -> tuple[str, str]:
    """Tokens/s of the second half, and the longest pause in seconds."""
    counts = on_cpu(shape, steps, slots, make("predictive", shape))
    half = len(steps) - len(steps) // 2
    missed = counts.warm_misses / half / shape[0] * MODEL_LAYERS
    seconds = PASS_SECONDS + ROW_SECONDS * size + missed * EXPERT_BYTES / LINK
    pause = seconds * (1 + (RUNNING // size - 1) * turn)
    return f"{size / seconds:.1f}", f"{pause:.2f}"


def main() -> None:
    """Print a table for each capacity."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    traffic: dict[str, tuple[Shape, list[Stream]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            traffic[kind] = load(unpack(f"{kind}_held_out", Path(folder)))
    for router in ROUTERS:
        drawn = [Stream(None, ids) for ids in router.draw(60, (64, 256), seed=2)]
        traffic[router.name] = (LAYERS, router.experts), drawn
    plans = [f"{size} x {turn}{' similar' * similar}" for size, turn, similar in PLANS]
    print("| traffic | slots | " + " | ".join(plans) + " |\n" + "| --- " * (len(plans) + 2) + "|")
    for name, (shape, streams) in traffic.items():
        for capacity in (25, 50):
            slots = shape[0] * shape[1] * capacity // 100
            cells = []
            for size, turn, similar in PLANS:
                steps = schedule(streams, shape[1], size, turn, similar)
                cells.append(" / ".join(judge(shape, steps, slots, size, turn)))
            print(f"| {name} | {capacity} % | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
