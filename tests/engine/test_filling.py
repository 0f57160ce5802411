"""An engine serves before its experts are in memory, and they come while it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from moestro.engine.messages import Stats, Stop
from moestro.engine.process import Loop
from moestro.expert_cache.store import SafetensorsStore
from moestro.stats import FillStats
from tests.models.test_parity import blob, experts
from tests.oracle import drive
from tests.oracle.golden import Golden
from tests.oracle.specs import SPECS

Checkpoints = Callable[[str], Path]
Goldens = Callable[[str], Golden]
NAME = "qwen3-wide-head"


def test_it_is_ready_when_the_dense_weights_are_in(
    checkpoint: Checkpoints, golden: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    read = SafetensorsStore.read

    def held(store: SafetensorsStore, layer: int, expert: int, out: memoryview) -> int:
        assert gate.wait(30)
        return read(store, layer, expert, out)

    monkeypatch.setattr(SafetensorsStore, "read", held)
    case = golden(NAME).cases[0]
    with drive.engine(checkpoint(NAME), filled=False) as engine:
        for _ in range(3):
            engine.step()
        assert engine.filling
        total = experts(SPECS[NAME])
        assert engine.stats().experts.fill == FillStats(active=True, total=total)
        gate.set()
        found = drive.generate(engine, [drive.greedy("a", case.prompt, 4)])["a"]
        assert tuple(found.tokens) == case.tokens[:4]
        while engine.filling:
            engine.step()
        assert engine.stats().experts.fill == FillStats(total=total, resident=total)


@pytest.mark.parametrize("slots", [4, 20])
def test_text_is_the_same_while_experts_come(
    checkpoint: Checkpoints, golden: Goldens, slots: int
) -> None:
    spec = SPECS[NAME]
    cases = golden(NAME).cases
    few = {"expert_slots": slots, "host_memory": experts(spec) // 3 * blob(spec)}
    with drive.engine(checkpoint(NAME), filled=False, **few) as engine:
        requests = [drive.greedy(f"{n}", case.prompt, 8) for n, case in enumerate(cases)]
        outputs = drive.generate(engine, requests, every=1, hurried=True)
        for number, case in enumerate(cases):
            assert tuple(outputs[str(number)].tokens) == case.tokens[:8]
        engine._cache.check(verify_bytes=True)  # type: ignore[call-arg]
        engine.finish_fill()
        engine._cache.check(verify_bytes=True)  # type: ignore[call-arg]


def test_an_idle_engine_goes_on_by_itself(checkpoint: Checkpoints) -> None:
    """Nobody says a word to it until all experts are there."""
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://engine")
    theirs.connect("inproc://engine")
    sent: list[Any] = []
    full = threading.Event()

    class Outbox:
        def send(self, *messages: Any) -> None:
            for message in messages:
                sent.append(message)
                if isinstance(message, Stats) and not message.stats.experts.fill.active:
                    full.set()

    with drive.engine(checkpoint(NAME), filled=False) as engine:
        loop = Loop(engine, theirs, Outbox())  # type: ignore[arg-type]
        thread = threading.Thread(target=loop.run)
        thread.start()
        assert full.wait(30)
        ours.send(msgspec.msgpack.encode([Stop()]))
        thread.join(30)
        assert not thread.is_alive()
        fill = engine.stats().experts.fill
        assert fill.resident == fill.total == experts(SPECS[NAME])
    ours.close(0)
    theirs.close(0)
    context.term()
