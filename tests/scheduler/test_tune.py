"""Seats that change while sequences run, and sequences that nobody waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moestro.errors import ConfigError, QueueFull
from moestro.types import Request, SamplingParams
from tests.scheduler.fakes import Harness


def running(harness: Harness) -> int:
    return harness.scheduler.stats().running


def finish(harness: Harness) -> None:
    while harness.turn() is not None:
        assert running(harness) <= 4
    for id in harness.requests:
        harness.check_finished(id)


def test_fewer_seats_end_nobody() -> None:
    harness = Harness(seqs=4)
    for name in "abcdef":
        harness.add(name, 3, max_tokens=20)
    for _ in range(4):
        harness.turn()
    assert running(harness) == 4
    harness.scheduler.tune(1)
    harness.turn()
    assert running(harness) == 4
    while not all(harness.finished(name) for name in "abcd"):
        harness.turn()
    harness.turn()
    assert running(harness) == 1
    harness.scheduler.tune(2)
    harness.turn()
    harness.turn()
    assert running(harness) == 2
    finish(harness)
    assert harness.scheduler.stats().preemptions == 0


def test_more_seats_than_planned_are_refused() -> None:
    harness = Harness(seqs=4)
    for wrong in (0, -1, 5):
        with pytest.raises(ConfigError, match="4 at most"):
            harness.scheduler.tune(wrong)
    harness.scheduler.tune(4)


def test_after_a_change_whoever_sends_bounds_the_queue() -> None:
    harness = Harness(seqs=1, queued=1)
    harness.add("a", 3)
    harness.add("b", 3)
    with pytest.raises(QueueFull):
        harness.add("c", 3)
    harness.scheduler.tune(1)
    harness.add("c", 3)
    finish(harness)


def test_background_sequences_take_no_place_and_run_last() -> None:
    harness = Harness(seqs=1, queued=1)

    def background(id: str) -> None:
        plain = Request(id, (1, 2, 3), SamplingParams(max_tokens=3), priority=2**63 - 1)
        harness.add_request(replace(plain, background=True))

    background("x")
    background("y")
    background("z")
    harness.add("a", 3, max_tokens=3)
    harness.add("b", 3, max_tokens=3)
    with pytest.raises(QueueFull):
        harness.add("c", 3)
    harness.scheduler.abort("y")
    finish_in_order = []
    while harness.turn() is not None:
        finish_in_order += [
            id for id in "abxz" if harness.finished(id) and id not in finish_in_order
        ]
    assert finish_in_order == ["a", "b", "x", "z"]
