"""What is sent again after a crash, to whom, and how often an engine is started."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from moestro.engine.live import Live
from moestro.engine.restarts import Restarts
from moestro.engine.roster import Roster
from moestro.engine.stream import Stream
from moestro.scheduler.limits import Limits
from moestro.types import Finish, Request, SamplingParams, Timing, TokenEvent

LIMITS = Limits(
    max_model_len=20, max_num_seqs=4, max_num_queued=4, vocab_size=100, kv_tokens=12,
    max_sweep_tokens=8,
)  # fmt: skip
TIMING = Timing(1.0, 2.0, 3.0, 0.5, 2, 1)


def live(id: str = "a", *, opened: float = 0.0, prompt: int = 3, **sampling: int | tuple) -> Live:
    params = SamplingParams(**({"max_tokens": 8} | sampling))
    stream = Stream([id], lambda _: None, lambda: None)
    return Live(Request(id, tuple(range(prompt)), params), stream, opened)


def test_a_new_engine_gets_all_tokens_so_far() -> None:
    one = live()
    assert one.submit(0.0) == one.request
    one.take(TokenEvent("a", (4, 5)), 1.0)
    one.take(TokenEvent("a", (6,)), 2.0)
    assert one.submit(3.0) == replace(one.request, generated=(4, 5, 6))


@pytest.mark.parametrize(
    ("tokens", "sampling", "want"),
    [
        ((), {}, None),
        ((5, 6), {}, None),
        (tuple(range(10, 18)), {}, (Finish.LENGTH, None)),
        ((5, 9), {"eos_token_ids": (9,)}, (Finish.STOP, None)),
        ((5, 9), {"stop_token_ids": (9,)}, (Finish.STOP, 9)),
        (tuple(range(10, 19)), {"max_tokens": 50}, None),  # the pool is full but may go on
        (tuple(range(10, 20)), {"max_tokens": 50}, (Finish.LENGTH, None)),
    ],
)
def test_an_end_without_its_event(
    tokens: tuple[int, ...], sampling: dict, want: tuple | None
) -> None:
    one = live(**sampling)
    one.submit(0.0)
    for token in tokens:
        one.take(TokenEvent("a", (token,)), 1.0)
    event = one.end(LIMITS)
    assert (None if event is None else (event.finish, event.stop_token)) == want
    assert event is None or event.token_ids == ()


def test_times_count_from_the_first_engine() -> None:
    one = live()
    one.submit(0.0)
    first = one.take(TokenEvent("a", (1,), timing=TIMING), 5.0)
    assert first.timing == TIMING
    one.crashed()
    one.submit(8.0)
    again = structs.replace(TIMING, cached_tokens=0, preemptions=0)
    assert one.take(TokenEvent("a", (2,), timing=again), 9.0).timing is None
    last = one.take(TokenEvent("a", (3,), timing=again, finish=Finish.LENGTH), 10.0)
    assert last.timing == Timing(1.0, 2.0, 5.0, 1.0, 2, 1)


def test_a_request_that_had_no_token_queued_all_the_time() -> None:
    one = live(opened=2.0)
    one.submit(2.0)
    one.crashed()
    one.submit(9.0)
    event = one.take(TokenEvent("a", (1,), timing=TIMING), 11.0)
    assert event.timing is not None
    assert event.timing.queued == 8.0


class Engine:
    """Kills itself when one of `poison` is to get a token."""

    def __init__(self, roster: Roster, *poison: str) -> None:
        self.roster, self.poison = roster, poison
        self.tries: list[str] = []
        self.failed: list[str] = []

    def live_once(self) -> bool:
        """Until a crash (True), or nothing is to be done."""
        running: list[Live] = []
        self.tries.append("")
        while True:
            due = self.roster.due()
            for one in due:
                one.submit(0.0)
                self.tries[-1] += one.request.id
            running += due
            fresh = [one for one in running if one.waits_for_token]
            if not fresh:
                return False
            if any(one.request.id in self.poison for one in fresh):
                for one in self.roster.crashed():
                    self.failed.append(one.request.id)
                    self.roster.pop(one.request.id)
                return True
            for one in fresh:
                one.take(TokenEvent(one.request.id, (1,)), 0.0)


@pytest.mark.parametrize(
    ("poison", "tries"),
    [("c", ["abcd", "abcd", "abc", "abd"]), ("a", ["abcd", "abcd", "a", "bcd"])],
)
def test_the_one_to_blame_is_found(poison: str, tries: list[str]) -> None:
    roster = Roster()
    for id in "abcd":
        roster.add(live(id))
    engine = Engine(roster, poison)
    while engine.live_once():
        pass
    assert engine.failed == [poison]
    assert engine.tries == tries
    assert [one.request.id for one in roster] == [id for id in "abcd" if id != poison]


def test_a_long_prompt_in_two_crashes_in_a_row_gets_another_try() -> None:
    roster = Roster()
    long, short = live("l", max_tokens=500), live("s", max_tokens=500)
    roster.add(long)
    roster.add(short)
    for _ in range(2):
        assert roster.due() == [long, short]
        long.submit(0.0)
        short.submit(0.0)
        short.take(TokenEvent("s", (1,)), 0.0)
        assert roster.crashed() == []
    assert roster.due() == [short]
    short.submit(0.0)
    assert roster.due() == []
    short.take(TokenEvent("s", (1,)), 0.0)
    assert roster.due() == [long]  # alone: nobody else waits
    long.submit(0.0)
    assert roster.due() == []
    assert roster.crashed() == [long]


def test_who_only_lives_through_crashes_is_never_given_up() -> None:
    roster = Roster()
    one = live(max_tokens=500)
    roster.add(one)
    for _ in range(50):
        assert roster.due() == [one]
        one.submit(0.0)
        one.take(TokenEvent("a", (1,)), 0.0)
        assert roster.crashed() == []
    assert len(one.tokens) == 50


def test_restarts_are_bounded_within_a_window() -> None:
    restarts = Restarts(3, window=600, delays=(0.0, 1.0, 5.0))
    assert [restarts.next(now, ready=True) for now in (0, 10, 20, 30)] == [0.0, 0.0, 0.0, None]
    assert restarts.next(599, ready=True) is None
    assert restarts.next(600, ready=True) == 0.0
    assert restarts.total == 4
    assert Restarts(0).next(0.0, ready=True) is None


def test_restarts_of_engines_that_never_get_ready_are_bounded_however_slow_they_are() -> None:
    restarts = Restarts(2, window=600)
    assert restarts.next(0, ready=False) is not None
    assert restarts.next(1000, ready=False) is not None
    assert restarts.next(2000, ready=False) is None
    assert restarts.used_up == "it was restarted 2 times without getting ready"
    once = Restarts(1)
    assert once.next(0, ready=True) is not None
    assert once.next(10, ready=True) is None
    assert once.used_up == "it was restarted once within 10 minutes"


def test_the_wait_grows_while_no_engine_gets_ready() -> None:
    restarts = Restarts(9, delays=(0.0, 1.0, 5.0))
    ready = (True, False, False, False, True, False)
    waits = [restarts.next(0.0, ready=one) for one in ready]
    assert waits == [0.0, 1.0, 5.0, 5.0, 0.0, 1.0]
