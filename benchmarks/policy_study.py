"""Which expert policy is best? Hit rates by policy, capacity, number of streams and traffic.

    python -m benchmarks.policy_study                        # about five minutes on one core
    python -m benchmarks.policy_study --write docs/policies  # writes the rows, a table and plots

Replays the held-out traces of `record_traces` and the routers of `synthetic_routers` (those are
made up) by the rules of `policy_replay`. Each row has hits of all decode passes, from empty slots
("cold"), and of the second half ("warm"); the share of Belady's margin that a policy wins over
textbook LRU (`plain_lru`) and over `lru` as the server runs it, which protects a working set that
cannot fit; and the time that fetching would expose in a step of a model of 48 such layers with
experts of 9.4 MB over a link of 51 GB/s.

`predictive_kept` is `predictive` with what it learned from the tuning trace of the same traffic, as
a server has that keeps its state (`--expert-policy-state`). Nothing else was fitted to any trace in
this study; what the constants of the policy were tuned on are the tuning traces.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import policy_plots
from benchmarks.policy_replay import (
    Counts,
    Pass,
    PlainLru,
    Shape,
    Stream,
    best,
    decodes,
    load,
    on_cpu,
    on_gpu,
    passes,
)
from benchmarks.record_traces import KINDS, unpack
from benchmarks.synthetic_routers import LAYERS, ROUTERS
from moestro.expert_cache.policies import make_policy
from moestro.expert_cache.policy import Policy

CAPACITIES = (5, 10, 25, 50, 75)  # percent of all experts
STREAMS = (1, 4, 8, 16, 32)
PASSES = 300  # decode passes of a replay, at most
SYNTHETIC_PASSES = 100
ON_CPU = ("plain_lru", "lru", "lfu", "lru_frequency", "score", "activation_aware", "predictive")
ON_GPU = ("lru", "lru_frequency", "predictive")
KEPT = "predictive_kept"
MODEL_LAYERS, EXPERT_BYTES, LINK = 48, 9.4e6, 51e9
Row = dict[str, Any]
Replay = Callable[[Shape, Sequence[Pass], int, Policy], Counts]


def make(name: str, shape: Shape) -> Policy:
    """A policy by its name in this study."""
    return PlainLru(*shape) if name == "plain_lru" else make_policy(name, *shape)


def _trained(shape: Shape, steps: Sequence[Pass], replay: Replay, slots: int) -> Policy:
    """What a server that served `steps` has kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        old, new = make("predictive", shape), make("predictive", shape)
        replay(shape, steps, slots, old)
        old.save(path)
        new.load(path)
    return new


def _rows(
    about: Row, shape: Shape, steps: list[Pass], past: list[Pass] | None, capacities: Sequence[int]
) -> Iterator[Row]:
    """Replays of one traffic at one number of streams."""
    for capacity in capacities:
        slots = shape[0] * shape[1] * capacity // 100
        paths: list[tuple[str, Replay, list[Pass], Sequence[str]]] = [
            ("cpu", on_cpu, steps, ON_CPU),
            ("gpu", on_gpu, decodes(steps), ON_GPU),
        ]
        for path, replay, some, names in paths:
            found = {"belady": best(shape, some, slots)}
            found |= {name: replay(shape, some, slots, make(name, shape)) for name in names}
            if past is not None:
                policy = _trained(shape, decodes(past), replay, slots)
                found[KEPT] = replay(shape, some, slots, policy)
            visits = max(1, len(decodes(some)) - len(decodes(some)) // 2) * shape[0]
            for name, counts in found.items():
                yield about | {
                    "path": path,
                    "capacity": capacity,
                    "passes": len(decodes(some)),
                    "policy": name,
                    **_figures(counts, found, visits),
                }


def _figures(counts: Counts, found: dict[str, Counts], visits: int) -> Row:
    def rate(some: Counts) -> float:
        return some.warm_hits / max(1, some.warm_hits + some.warm_misses)

    def share(base: str) -> float | None:
        if base not in found or rate(found["belady"]) <= rate(found[base]):
            return None
        margin = rate(found["belady"]) - rate(found[base])
        return round((rate(counts) - rate(found[base])) / margin, 3)

    missed = counts.warm_misses / visits
    return {
        "cold": round(counts.hits / max(1, counts.hits + counts.misses), 4),
        "warm": round(rate(counts), 4),
        "misses_a_layer": round(missed, 3),
        "exposed_ms": round(missed * MODEL_LAYERS * EXPERT_BYTES / LINK * 1e3, 2),
        "share_over_plain_lru": share("plain_lru"),
        "share_over_lru": share("lru"),
    }


def study(
    kinds: Sequence[str], streams: Sequence[int], capacities: Sequence[int], most: int
) -> Iterator[Row]:
    """All rows, traffic by traffic."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            traffic = [
                load(unpack(f"{kind}_{part}", Path(folder))) for part in ("held_out", "tune")
            ]
            (shape, held_out), (_, tune) = traffic
            for count in streams:
                about = {"traffic": kind, "synthetic": False, "streams": count}
                steps, past = passes(held_out, count, most), passes(tune, count, most)
                yield from _rows(about, shape, steps, past, capacities)
    for router in ROUTERS:
        shape = LAYERS, router.experts
        for count in streams:
            most_here = min(most, SYNTHETIC_PASSES)
            enough = count + count * most_here // 100
            drawn = [Stream(None, ids) for ids in router.draw(enough, (64, 256), seed=2)]
            about = {"traffic": router.name, "synthetic": True, "streams": count}
            yield from _rows(about, shape, passes(drawn, count, most_here), None, capacities)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write rows.json, table.md, *.svg"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--capacity", type=int, nargs="+", default=CAPACITIES, metavar="PERCENT")
    parser.add_argument("--passes", type=int, default=PASSES, help=f"at most ({PASSES})")
    asked = parser.parse_args()
    begun = time.monotonic()
    rows = []
    for row in study(KINDS, asked.streams, asked.capacity, asked.passes):
        if not rows or rows[-1]["traffic"] != row["traffic"]:
            print(f"{time.monotonic() - begun:4.0f} s  {row['traffic']}", flush=True)
        rows.append(row)
    print(policy_plots.table(rows))
    if asked.write is not None:
        asked.write.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(list(row.values())) for row in rows)
        names = json.dumps(list(rows[0]))
        (asked.write / "rows.json").write_text(f'{{"columns": {names}, "rows": [\n{lines}\n]}}\n')
        (asked.write / "table.md").write_text(policy_plots.document(rows))
        for traffic in dict.fromkeys(row["traffic"] for row in rows):
            plot = policy_plots.plot(rows, traffic)
            (asked.write / f"{traffic}.svg").write_text(plot)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
