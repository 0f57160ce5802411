"""What a benchmark in this process measures: exact on a scripted engine with a fake clock, and
consistent on a real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.config import Config
from moestro.engine import bench_disk
from moestro.engine.bench import measure, measure_load
from moestro.engine.bench_batch import WINDOW, WINDOWS, drive, measured_floor, requests
from moestro.engine.bench_disk import read_disk
from moestro.engine.bench_figures import (
    Counts,
    Floor,
    Link,
    Load,
    Phase,
    bound,
    estimated_floor,
    percentile,
    spread,
    total,
)
from moestro.engine.bench_link import machine_figures, measure_link
from moestro.engine.messages import EngineInfo
from moestro.engine.synthetic import Synthetic
from moestro.errors import StepFailed
from moestro.stats import EngineStats, ExpertStats, SchedulerStats, TierStats
from moestro.types import Finish, Request, TokenEvent

LINK = Link(1e9, "given")


class Scripted:
    """An engine that answers everybody: a sweep of 2 s, steps of `seconds(n)`, each step missing
    `misses(n)` experts of 100 bytes, a tenth of its time exposed. Looking takes 0.25 s."""

    def __init__(
        self,
        seconds: Callable[[int], float] = lambda step: 0.5,
        misses: Callable[[int], int] = lambda step: 3,
        error: str | None = None,
    ) -> None:
        self.now = 100.0
        self.info = EngineInfo(4096, 99, 10**6, 16, (), {}, 8, 64)
        self.asked: list[Request] = []
        self._seconds, self._misses, self._error = seconds, misses, error
        self._rows: dict[str, tuple[Request, int]] = {}
        self._stats = EngineStats(
            scheduler=SchedulerStats(),
            experts=ExpertStats(expert_bytes=100, host=TierStats(), disk=TierStats()),
        )

    def clock(self) -> float:
        return self.now

    @property
    def idle(self) -> bool:
        return not self._rows

    def add(self, request: Request) -> None:
        self.asked.append(request)
        self._rows[request.id] = (request, 0)

    def step(self) -> list[TokenEvent]:
        new = [id for id, (_, said) in self._rows.items() if said == 0]
        if new:
            self.now += 2.0
            self._stats.scheduler.sweeps += 1
            self._stats.scheduler.swept_tokens += sum(len(self._rows[id][0].prompt) for id in new)
            self._count(hits=10, misses=7, seconds=2.0)
            return [self._say(id) for id in new]
        number = self._stats.scheduler.decode_steps
        self._stats.scheduler.decode_steps += 1
        self.now += self._seconds(number)
        self._count(5, self._misses(number), self._seconds(number))
        return [self._say(id) for id in list(self._rows)]

    def stats(self) -> EngineStats:
        self.now += 0.25
        old = self._stats
        experts = dataclasses.replace(
            old.experts, host=dataclasses.replace(old.experts.host), disk=TierStats()
        )
        return EngineStats(scheduler=dataclasses.replace(old.scheduler), experts=experts)

    def _count(self, hits: int, misses: int, seconds: float) -> None:
        experts = self._stats.experts
        experts.hits += hits
        experts.misses += misses
        experts.host.hits += misses
        experts.host.bytes_read += 100 * misses
        experts.exposed_seconds += seconds / 10

    def _say(self, id: str) -> TokenEvent:
        request, said = self._rows[id]
        if self._error is not None:
            del self._rows[id]
            return TokenEvent(id, finish=Finish.ERROR, error=self._error)
        self._rows[id] = (request, said + 1)
        over = said + 1 == request.sampling.max_tokens
        if over:
            del self._rows[id]
        return TokenEvent(id, (7,), finish=Finish.LENGTH if over else None)


def driven(engine: Scripted, load: Load) -> Any:
    return drive(engine, load, "x", engine.clock)  # type: ignore[arg-type]


# --- arithmetic -----------------------------------------------------------------------------


def test_percentiles() -> None:
    values = [float(n) for n in range(101)]
    assert [percentile(values, share) for share in (0, 0.5, 0.9, 0.99, 1)] == [0, 50, 90, 99, 100]
    assert percentile([3.0, 1.0], 0.5) == 2.0
    assert (percentile([4.0], 0.99), percentile([], 0.5)) == (4.0, 0.0)
    assert spread([1.0, 2.0, 6.0]) == pytest.approx(
        {"mean": 3.0, "p50": 2.0, "p90": 5.2, "p99": 5.92, "max": 6.0, "count": 3}
    )


def test_the_bound_is_the_floor_and_the_bytes() -> None:
    decode = Phase(10.0, 40, 20, Counts(host_bytes=4_000_000_000, exposed=5.0))
    found = bound(decode, Floor(0.25, True, 8), LINK)
    assert found is not None
    assert (found.step, found.bytes) == (0.5, 2e8)
    assert found.seconds == pytest.approx(0.25 + 0.2)
    assert found.share == pytest.approx(0.9)
    assert estimated_floor(decode) == Floor(0.25, False)
    assert bound(Phase(0.0, 0, 0, Counts()), None, LINK) is None
    assert estimated_floor(Phase(0.0, 0, 0, Counts())) is None


def test_phases_add_up() -> None:
    one = Phase(1.0, 2, 3, Counts(hits=4, disk_bytes=5))
    assert total([one, one]) == Phase(2.0, 4, 6, Counts(hits=8, disk_bytes=10))


# --- one batch, on a fake clock -------------------------------------------------------------


def test_prefill_and_decode_are_apart() -> None:
    engine = Scripted(seconds=lambda step: 0.5 + step)
    run = driven(engine, Load(batch=2, input_len=8, output_len=4))
    assert run.first == (2.0, 2.0)
    assert run.gaps == (0.5, 0.5, 1.5, 1.5, 2.5, 2.5)  # nothing of the looks at the counters
    counts = Counts(10, 7, from_host=7, host_bytes=700, exposed=pytest.approx(0.2))
    assert run.prefill == Phase(2.0, 16, 1, counts)
    counts = Counts(15, 9, from_host=9, host_bytes=900, exposed=pytest.approx(0.45))
    assert run.decode == Phase(4.5, 6, 3, counts)


def test_one_token_has_no_decode() -> None:
    run = driven(Scripted(), Load(batch=3, input_len=2, output_len=1))
    assert (run.gaps, run.decode) == ((), Phase(0.0, 0, 0, Counts()))


def test_a_failed_sequence_ends_the_benchmark() -> None:
    with pytest.raises(StepFailed, match="out of luck"):
        driven(Scripted(error="out of luck"), Load(1, 2, 3))


def test_prompts_are_random_ordinary_tokens() -> None:
    load = Load(batch=3, input_len=50, output_len=4, seed=1)
    asked = requests(load, "a", 40, 4)
    assert [len(request.prompt) for request in asked] == [50] * 3
    assert len({request.prompt for request in [*asked, *requests(load, "b", 40, 4)]}) == 6
    assert all(3 <= token < 40 for request in asked for token in request.prompt)
    assert asked == requests(load, "a", 40, 4)
    assert all(request.sampling.eos_token_ids == () for request in asked)


def test_the_floor_is_that_of_steps_without_misses() -> None:
    late = 4 * WINDOW
    engine = Scripted(
        seconds=lambda step: 0.5 if step < late else 0.125, misses=lambda step: int(step < late)
    )
    load = Load(batch=2, input_len=8, output_len=4)
    floor = measured_floor(engine, load, engine.clock)  # type: ignore[arg-type]
    assert floor == Floor(0.125, True, (WINDOWS - 4) * WINDOW)
    assert all(request.id.startswith("frozen-") for request in engine.asked)


def test_no_floor_when_every_step_misses_or_there_is_no_room() -> None:
    engine = Scripted()
    assert measured_floor(engine, Load(1, 8, 4), engine.clock) is None  # type: ignore[arg-type]
    engine = Scripted(misses=lambda step: 0)
    full = Load(1, 4095, 1)
    assert measured_floor(engine, full, engine.clock) is None  # type: ignore[arg-type]
    assert engine.asked == []


def test_a_load_is_warmed_up_and_repeated() -> None:
    engine, stages = Scripted(), []
    measured = measure_load(
        engine,  # type: ignore[arg-type]
        Load(batch=2, input_len=8, output_len=5, repeat=3, warmup=2),
        LINK,
        lambda stage, done, total: stages.append((stage, done, total)),
        engine.clock,
    )
    assert len(measured.runs) == 3
    assert measured.floor == Floor(pytest.approx(0.45), False)  # a tenth was exposed
    assert stages == [
        *(("batch 2: warm-up", n, 2) for n in range(2)),
        *(("batch 2: run", n, 3) for n in range(3)),
        ("batch 2: floor", 0, 0),
    ]
    assert len(engine.asked) == 2 * (2 + 3 + 1)


# --- a real engine --------------------------------------------------------------------------


def test_a_tiny_engine_adds_up(checkpoint: Callable[[str], Path]) -> None:
    config = Config(load_format="dummy", threads=1, kv_cache_tokens=1024, expert_slots=10)
    loads = [Load(1, 5, 9, repeat=2), Load(3, 5, 4)]
    made_up = Synthetic(scramble=True, routing="uniform", keep=0.5)
    found = measure(config, checkpoint("qwen3"), loads, made_up, link=LINK)
    layers, top_k = 3, 2
    alone, three = found
    for run in alone.runs:
        assert (run.prefill.tokens, run.decode.tokens, run.decode.steps) == (5, 8, 8)
        assert (len(run.first), len(run.gaps)) == (1, 8)
        assert sum(run.gaps) == pytest.approx(run.decode.seconds, rel=0.05)
        counts = run.decode.counts
        assert counts.hits + counts.misses == 8 * layers * top_k
        assert counts.misses == counts.from_host + counts.from_disk > 0
    assert alone.floor is not None
    assert alone.floor.measured  # frozen rows: their six experts fit in the slots
    assert (len(three.runs), three.runs[0].decode.tokens) == (1, 9)


# --- the machine ----------------------------------------------------------------------------


def test_a_disk_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_disk, "PIECE", 8192)
    file = tmp_path / "f"
    file.write_bytes(bytes(100_000))
    for target in (file, None):
        found = read_disk(tmp_path, target, 100_000)
        if found.rate is None:  # a filesystem without direct reads
            assert "O_DIRECT" in found.note
        else:
            assert found.rate > 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_disk_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"x")
    assert read_disk(tmp_path, small, 4096).note == f"{small} is shorter than 4096 bytes"
    missing = read_disk(tmp_path / "none", None, 4096)
    assert (missing.rate, missing.note) == (None, f"{tmp_path / 'none'}: No such file or directory")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_link_is_memory(tmp_path: Path) -> None:
    link = measure_link("cpu")
    assert link.rate > 1e8
    assert link.source == "measured, copy in memory"
    figures = machine_figures(tmp_path, None, 1 << 20)
    missing = {figure.name for figure in figures if "CUDA" in figure.note}
    assert missing == {
        "host to device",
        "device to host",
        "device memory copy",
        "launch",
        "graph node",
        "round trip",
    }
    assert [figure.name for figure in figures if figure.name not in missing] == [
        "memory copy",
        "disk read",
    ]
