"""Does the included demo model answer as well in a crowd as alone?

Asks the held-out questions of `tools/train_demo` through the front door, one at a time and then 32
at a time, and marks the answers. A crowd must not change a single one. With --starved the server
has slots for a quarter of the experts only, which must change nothing either.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import report
from tests.oracle.serving import Served, serve
from tools.train_demo.data import Trial, held_out_trials
from tools.train_demo.evaluate import (
    Answer,
    count_differences,
    evaluate,
    scores,
    server_backend,
    transformers_backend,
)
from tools.train_demo.tasks import TASKS

DEMO = Path(__file__).parents[1] / "moestro" / "demo" / "model"


def asked(served: Served, trials: list[Trial], crowd: int) -> tuple[list[Answer], float]:
    """All answers with `crowd` questions in flight, and the seconds it took."""
    started = time.monotonic()
    answers = evaluate(server_backend(served.url, None, crowd), trials)
    return answers, time.monotonic() - started


def mean(answers: list[Answer]) -> float:
    """Percent right, every task counting alike."""
    found = scores(answers)
    return sum(found.values()) / len(found)


def run(arguments: argparse.Namespace, log: Path) -> dict[str, tuple[list[Answer], float]]:
    """Answers and seconds of each way to ask."""
    trials = [t for task in TASKS for t in held_out_trials(task, arguments.count, arguments.seed)]
    found: dict[str, tuple[list[Answer], float]] = {}
    flags = ["--expert-slots", str(arguments.starved)] if arguments.starved else []
    with serve(arguments.model, *flags, log=log) as served:
        for crowd in (1, arguments.crowd):
            found[f"{crowd} at a time"] = asked(served, trials, crowd)
        served.wait_idle()
    if arguments.transformers:
        started = time.monotonic()
        answers = evaluate(transformers_backend(arguments.model, 50, "float32"), trials)
        found["transformers"] = answers, time.monotonic() - started
    return found


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint (default: the demo)")
    parser.add_argument("--count", type=int, default=50, help="questions of each task")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--crowd", type=int, default=32)
    parser.add_argument("--starved", type=int, metavar="SLOTS", help="expert slots of the server")
    parser.add_argument("--transformers", action="store_true", help="also ask transformers")
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        found = run(arguments, work / "server.log")
    alone, *others = found
    rows = [
        (f"right, {way}", f"{mean(answers):.2f} % in {seconds:.1f} s")
        for way, (answers, seconds) in found.items()
    ]
    rows += [
        (f"right, {task}", f"{score:.1f} %") for task, score in scores(found[alone][0]).items()
    ]
    bars = [
        report.Bar(f"other answers, {way}", count_differences(found[way][0], found[alone][0]), 0)
        for way in others
    ]
    details = {"scores": {way: scores(answers) for way, (answers, _) in found.items()}}
    return report.finish(arguments, rows, bars, details)


if __name__ == "__main__":
    sys.exit(main())
