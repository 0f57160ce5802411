"""What can the HTTP side carry, and what does it add to a token's way?

The engine is a process without a model (`benchmarks.streams.engine`) that speaks the real protocol
over the real socket, one event for each token, and notes when each turn left. The server is the
real one, the clients are one cheap process; all three share the machine. Each round runs 200
streams through real sockets at a number of tokens a second. Counted is the time while all of them
run: tokens that arrived a second, processor time of the server process a token, and for each token
the time from its leaving the engine to its arrival at the client (which is in the client's hands as
well: on two cores it waits for its turn). With `--soak`, mixed traffic runs instead for so many
minutes, 5 % of its clients leave at a random moment, and the server's resident memory is watched.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import moestro.demo
from benchmarks import report
from benchmarks.streams import client, soak
from benchmarks.streams.engine import CROWD, STAMPS
from tests.oracle.serving import Served, serve

MODEL = Path(moestro.demo.__file__).parent / "model"
FLAGS = ("--served-model-name", "letters", "--max-num-seqs", "512", "--max-num-queued", "4096")
SAMPLES = 0.05  # seconds between two looks at the processor time
BAR = 15_000  # tokens a second
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass
class Measured:
    """One round. Times in seconds; `cpu` by process, a token."""

    asked: float  # tokens a second that the engine was to give
    given: float  # that it gave
    arrived: float
    cpu: dict[str, float]
    delays: list[float]
    merged: float  # tokens in one chunk, in the mean


class Clock:
    """Processor time of some processes, sampled, so that it can be told for any span."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self._seen: list[tuple[float, dict[str, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Clock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLES):
            spent = {name: sum(p.cpu_times()[:2]) for name, p in self._processes.items()}
            self._seen.append((time.monotonic(), spent))

    def spent(self, since: float, until: float) -> dict[str, float]:
        """Seconds of processor time between two moments, by process."""
        inside = [one for one in self._seen if since <= one[0] <= until]
        (start, before), (end, after) = inside[0], inside[-1]
        scale = (until - since) / (end - start)
        return {name: scale * (after[name] - before[name]) for name in after}


@contextmanager
def _clients() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def measure(served: Served, stamps: Path, rate: float, arguments: argparse.Namespace) -> Measured:
    """Run one round at `rate` tokens a second."""
    turns = max(1, round(rate / arguments.streams))
    body: dict[str, Any] = {
        "max_tokens": int(turns * arguments.seconds),
        "ignore_eos": True,
        "stream": True,
        "priority": turns,
    }
    if arguments.route == "chat":
        body["messages"] = [{"role": "user", "content": "Say the letters."}]
    else:
        body["prompt"] = "Say the letters."
    processes = {"server": psutil.Process(served.process.pid), "engine": served.engine}
    before = len(_noted(stamps))
    with _clients() as pool, Clock(processes) as clock:
        work = pool.submit(
            client.run,
            served.port,
            PATHS[arguments.route],
            json.dumps(body).encode(),
            arguments.streams,
        )
        found = work.result()
    served.wait_idle()
    while not (noted := _noted(stamps)[before:]):  # it is written a moment after the last turn
        time.sleep(0.05)
    left = {k: v for one in noted for k, v in _left(one).items()}
    return _joined(found, left, turns * arguments.streams, clock)


def _noted(stamps: Path) -> list[dict[str, Any]]:
    if not stamps.exists():
        return []
    return [json.loads(line) for line in stamps.read_text().splitlines()]


def _left(noted: dict[str, Any]) -> dict[str, list[float]]:
    """When each token of each sequence left the engine, by the call's id."""
    times = noted["times"]
    return {id.rpartition("-")[0]: times[at:] for id, at in noted["began"].items()}


def _joined(
    found: client.Round, left: dict[str, list[float]], asked: float, clock: Clock
) -> Measured:
    since = max(stream.times[0] for stream in found.streams)  # all of them run
    until = min(left[stream.id][stream.tokens[-1] - 1] for stream in found.streams)
    delays: list[float] = []
    tokens = chunks = given = 0
    for stream in found.streams:
        sent = left[stream.id]
        given += sum(since <= when <= until for when in sent[: stream.tokens[-1]])
        before = 0
        for when, count in zip(stream.times, stream.tokens, strict=True):
            if since <= when <= until:
                delays += [when - sent[i] for i in range(before, count)]
                tokens += count - before
                chunks += 1
            before = count
    seconds = until - since
    cpu = {name: spent / tokens for name, spent in clock.spent(since, until).items()}
    cpu["client"] = found.cpu / sum(stream.tokens[-1] for stream in found.streams)
    return Measured(asked, given / seconds, tokens / seconds, cpu, delays, tokens / max(1, chunks))


def _shown(one: Measured) -> str:
    ms = [1e3 * report.percentile(one.delays, share) for share in (0.5, 0.99)]
    us = {name: 1e6 * spent for name, spent in one.cpu.items()}
    return (
        f"{one.arrived:.0f} of {one.given:.0f} arrive, delay p50 {ms[0]:.1f} p99 {ms[1]:.1f} ms, "
        f"CPU us/token server {us['server']:.1f} engine {us['engine']:.1f} "
        f"client {us['client']:.1f}, tokens/chunk {one.merged:.2f}"
    )


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round")
    parser.add_argument("--route", choices=sorted(PATHS), default="chat")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[8e3, 15e3, 20e3, 30e3], help="tokens a second"
    )
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of mixed traffic instead")
    parser.add_argument("--parallel", type=int, default=32, help="clients of the mixed traffic")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        stamps = work / "stamps"
        stamps.unlink(missing_ok=True)
        if not arguments.soak:
            os.environ |= {STAMPS: str(stamps), CROWD: str(arguments.streams)}
        module = "benchmarks.streams.server"
        with serve(MODEL, *FLAGS, log=work / "server.log", module=module) as served:
            if arguments.soak:
                return soak.report_of(served, arguments)
            rounds = []
            for rate in arguments.rates:
                rounds.append(measure(served, stamps, rate, arguments))
                print(f"{rounds[-1].asked:.0f} tokens/s asked: {_shown(rounds[-1])}", flush=True)
    rows = [(f"{one.asked:.0f} tokens/s asked", _shown(one)) for one in rounds]
    best = max(one.arrived for one in rounds)
    bars = [report.Bar("tokens a second through the HTTP side", best, BAR, at_least=True)]
    details = [vars(one) | {"delays": None} for one in rounds]
    return report.finish(arguments, rows, bars, {"rounds": details})


if __name__ == "__main__":
    sys.exit(main())
