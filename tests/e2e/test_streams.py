"""`benchmarks.streams` in small: it counts right, and all of its mixed traffic is served."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from benchmarks.streams import __main__ as streams
from benchmarks.streams import soak
from benchmarks.streams.engine import STAMPS
from tests.oracle.serving import serve


def test_a_round_and_a_little_soaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAMPS, str(tmp_path / "stamps"))
    arguments = argparse.Namespace(
        streams=4, seconds=1.5, route="chat", soak=1.5 / 60, parallel=12, seed=1
    )
    log = tmp_path / "server.log"
    with serve(
        streams.MODEL, *streams.FLAGS, log=log, module="benchmarks.streams.server"
    ) as served:
        one = streams.measure(served, tmp_path / "stamps", 200.0, arguments)
        soaked = soak.Soaked()
        asyncio.run(soak.run(served, soaked, arguments))
        served.wait_idle()
    assert one.asked == 200
    assert 0.5 < one.given / one.asked < 1.5
    assert one.merged >= 1
    assert all(0 < delay < 1.5 for delay in one.delays)
    assert one.cpu.keys() == {"server", "engine", "client"}
    assert sum(soaked.requests.values()) > 12
    assert soaked.resident


def test_growth_is_that_after_the_settling() -> None:
    sizes = [100] * 20 + [200] * 20 + [206] * 20
    assert soak.growth([(float(at), size) for at, size in enumerate(sizes)]) == pytest.approx(3)
