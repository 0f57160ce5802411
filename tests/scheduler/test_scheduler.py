"""One behaviour at a time."""

from __future__ import annotations

import pytest

from moestro.errors import ContextTooLong, InvalidRequest, QueueFull
from moestro.scheduler.pace import GAP_STEPS
from moestro.scheduler.plan import Sampled
from moestro.types import Finish, Grammar
from tests.scheduler.fakes import Cost, Harness

SLOW = Cost(layer=0.010, layers=10)  # one sweep takes ten decode steps


def rows(harness: Harness) -> list[list[str]]:
    """The ids in each sweep opened so far."""
    return [[row.id for row in plan.rows] for plan in harness.opened()]


def decoding(harness: Harness, id: str, max_tokens: int = 1000) -> None:
    """Bring a sequence to where it decodes."""
    harness.add(id, 3, max_tokens=max_tokens)
    while not harness.events[id]:
        harness.turn()


# Turns


def test_nothing_to_do_is_none() -> None:
    harness = Harness()
    assert harness.turn() is None
    assert harness.scheduler.idle


def test_a_prompt_is_swept_then_decoded() -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3, 4, 5), max_tokens=3)
    assert not harness.scheduler.idle
    first = harness.turn()
    assert first is not None
    assert first.opened is not None
    (row,) = first.opened.rows
    assert (row.tokens, row.start, row.output_index, row.samples) == ((1, 2, 3, 4, 5), 0, 0, True)
    assert len(row.blocks) == 2
    assert (first.advance, first.budget, first.decode) == (first.opened.number, None, None)
    second = harness.turn()
    assert second is not None
    assert second.decode is not None
    (step,) = second.decode.rows
    assert (step.token, step.position, step.output_index) == (harness.tokens("a")[0], 5, 1)
    assert (second.opened, second.advance, second.budget) == (None, None, None)
    harness.turn()
    last = harness.turn()
    assert last is not None
    assert (last.decode, last.advance, last.released) == (None, None, ("a",))
    assert harness.turn() is None
    harness.check_finished("a")


def test_while_others_decode_a_sweep_gets_what_the_gap_leaves() -> None:
    harness = Harness(cost=SLOW)
    decoding(harness, "a")
    harness.add("b", 10)
    plan = harness.turn()
    assert plan is not None
    assert plan.budget == pytest.approx((GAP_STEPS - 1) * SLOW.step)
    slower = harness.scheduler.schedule(harness.now, SLOW.step, 2 * SLOW.step)
    assert slower is not None
    assert slower.budget == pytest.approx((GAP_STEPS - 2) * SLOW.step)
    plan = harness.scheduler.schedule(harness.now, 0.0)
    assert plan is not None
    assert plan.budget == 0.001


def test_waiting_prompts_are_merged_up_to_the_window() -> None:
    harness = Harness(window=64)
    for id in "abcde":
        harness.add(id, 20, max_tokens=1)
    harness.run()
    assert rows(harness) == [["a", "b", "c"], ["d", "e"]]


def test_a_long_prompt_takes_several_sweeps() -> None:
    harness = Harness(window=16)
    harness.add("a", 40, max_tokens=2)
    harness.run()
    runs = [
        (row.start, len(row.tokens), row.samples)
        for plan in harness.opened()[:3]
        for row in plan.rows
    ]
    assert runs == [(0, 16, False), (16, 16, False), (32, 8, True)]
    harness.check_finished("a")


def test_a_small_sweep_overtakes_a_long_one_and_they_take_turns() -> None:
    cost = Cost(layer=0.004, layer_token=0.0001, layers=10)
    harness = Harness(window=1000, blocks=1000, cost=cost)
    decoding(harness, "runner")
    harness.add("long", 900)
    harness.turn()
    harness.add("short", 20, max_tokens=1)
    harness.add("middle", 300, max_tokens=1)
    start = len(harness.plans)
    harness.turn()
    assert rows(harness)[-1] == ["short"]
    while not harness.finished("short"):
        harness.turn()
    turns = [plan.advance for plan in harness.plans[start:]]
    assert turns == [3, 2, 3, 2, 3, 2, 3]  # the short one does three layers a turn
    assert not harness.events["long"]
    assert rows(harness)[-1] == ["short"]  # the middle one is not small: it waits for the long


def test_two_sweeps_take_short_turns_while_nobody_decodes() -> None:
    harness = Harness(window=1000, blocks=1000, cost=SLOW)
    harness.executor.interrupt = lambda now: now >= 0.02
    harness.add("long", 900, max_tokens=1)
    harness.turn()
    harness.add("short", 20, max_tokens=1)
    harness.turn()
    budgets = [plan.budget for plan in harness.plans]
    assert budgets == [None, 0.05]
    harness.run()
    assert harness.times["short"][-1] < harness.times["long"][-1]


def test_long_prompts_that_are_mostly_cached_overtake_too() -> None:
    harness = Harness(window=1000, blocks=1000, cost=SLOW)
    chat = tuple(n % 50 for n in range(600))
    harness.add("chat", chat, max_tokens=1)
    harness.run()
    decoding(harness, "runner")
    harness.add("long", 900)
    harness.turn()
    harness.add("other long", 900)
    harness.add("chat again", (*chat, 1, 2, 3), max_tokens=1)
    harness.turn()
    assert rows(harness)[-1] == ["chat again"]
    assert [row.start for row in harness.opened()[-1].rows] == [600]


def test_short_prompts_pass_a_started_one_that_waits_for_the_long_sweep() -> None:
    harness = Harness(window=300, blocks=1000, cost=SLOW)
    decoding(harness, "runner")
    harness.add("host", 900, max_tokens=1)
    harness.turn()
    harness.add("urgent", 300, max_tokens=1, priority=-1)
    while rows(harness)[-1] != ["urgent"]:
        harness.turn()
    harness.add("short", 20, max_tokens=1)
    harness.turn()
    assert rows(harness)[-1] == ["short"]


def test_small_prompts_wait_for_the_small_sweep_ahead_to_go_together() -> None:
    harness = Harness(window=1000, blocks=1000, cost=SLOW)
    decoding(harness, "runner")
    harness.add("a", 20)
    harness.turn()
    harness.add("b", 20)
    harness.turn()
    harness.add("c", 20)
    while not harness.events["c"]:
        harness.turn()
    assert rows(harness)[1:] == [["a"], ["b", "c"]]


def test_a_long_prompt_need_not_wait_for_a_small_sweep() -> None:
    harness = Harness(window=1000, blocks=1000, cost=SLOW)
    decoding(harness, "runner")
    harness.add("a", 20)
    harness.turn()
    harness.add("b", 20)
    harness.add("long", 600)
    harness.turn()
    assert rows(harness)[1:] == [["a"], ["b", "long"]]
    assert len(harness.executor.sweeps) == 2


def test_guests_share_the_sweeps_of_a_prompt_over_the_window() -> None:
    harness = Harness(window=4000, blocks=10_000, max_model_len=50_000, cost=SLOW)
    harness.add("host", 12_000, max_tokens=1)
    harness.add("guest", 2700, max_tokens=1)
    harness.add("peer", 11_000, max_tokens=1)
    harness.run()
    first, second, third = [
        [(row.id, len(row.tokens)) for row in plan.rows] for plan in harness.opened()[:3]
    ]
    assert first == [("host", 2000), ("guest", 2000)]
    assert second == [("host", 3300), ("guest", 700)]
    assert third == [("host", 4000)]
    for id in harness.requests:
        harness.check_finished(id)


# Admission


def test_seats_and_the_queue() -> None:
    harness = Harness(seqs=2, queued=1)
    for id in "abc":
        harness.add(id, 4, max_tokens=3)
    with pytest.raises(QueueFull):
        harness.add("d", 4)
    harness.turn()
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    with pytest.raises(QueueFull):
        harness.add("d", 4)
    harness.run()
    harness.add("d", 4)
    harness.run()
    assert max(len(plan.decode.rows) for plan in harness.plans if plan.decode) == 2
    for id in "abcd":
        harness.check_finished(id)


def test_what_limits_refuse_is_refused() -> None:
    harness = Harness(blocks=8)
    with pytest.raises(ContextTooLong):
        harness.add("a", 33)
    with pytest.raises(ContextTooLong):
        harness.add("a", 32)
    harness.add("a", 31, max_tokens=50)
    with pytest.raises(InvalidRequest):
        harness.scheduler.add(harness.requests["a"], 0.0)
    harness.add("small", 2)
    harness.run()
    assert len(harness.tokens("a")) == 2
    assert harness.events["a"][-1].finish is Finish.LENGTH
    harness.check_finished("small")


def test_lower_priority_values_run_first() -> None:
    harness = Harness(seqs=1)
    for id, priority in (("late", 5), ("first", -1), ("second", -1), ("third", 0)):
        harness.add(id, 4, max_tokens=1, priority=priority)
    harness.run()
    assert rows(harness) == [["first"], ["second"], ["third"], ["late"]]


def test_nobody_passes_one_whose_blocks_do_not_fit() -> None:
    harness = Harness(blocks=16, window=256)
    harness.add("runner", 16, max_tokens=12)
    harness.turn()
    harness.add("big", 44, max_tokens=2)
    harness.add("small", 4, max_tokens=2)
    while not harness.finished("runner"):
        harness.turn()
        assert not harness.events["small"]
    harness.run()
    assert rows(harness) == [["runner"], ["big", "small"]]


def test_a_newcomer_leaves_a_block_for_each_runner() -> None:
    harness = Harness(blocks=8, window=256)
    harness.add("a", 10, max_tokens=3)  # 3 blocks
    harness.turn()
    harness.add("b", 20, max_tokens=1)  # 5 blocks: they fit, but none would be left
    harness.turn()
    assert rows(harness) == [["a"]]
    harness.run()
    assert harness.scheduler.stats().preemptions == 0


def test_a_waiting_one_that_does_not_fit_does_not_hold_up_one_that_has_started() -> None:
    harness = Harness(blocks=16, window=16)
    harness.add("started", 40, max_tokens=1)
    harness.turn()
    harness.add("urgent", 60, max_tokens=1, priority=-1)
    harness.add("urgent too", 60, max_tokens=1, priority=-1)
    harness.run()
    assert rows(harness) == [["started"]] * 3 + [["urgent"]] * 4 + [["urgent too"]] * 4
    for id in harness.requests:
        harness.check_finished(id)


# Prefixes


def test_choices_of_one_prompt_compute_it_once() -> None:
    harness = Harness(cost=SLOW)
    prompt = tuple(range(1, 22))
    for choice in range(4):
        harness.add(f"c{choice}", prompt, max_tokens=3)
    harness.add("other", 9, max_tokens=3)
    harness.run()
    assert rows(harness) == [["c0", "other"], ["c1", "c2", "c3"]]
    assert [len(row.tokens) for row in harness.opened()[1].rows] == [1, 1, 1]
    assert harness.events["c1"][0].timing.cached_tokens == 20
    assert harness.scheduler.stats().prompt_tokens == 4 * 21 + 9
    assert harness.scheduler.stats().swept_tokens == 21 + 9 + 3


def test_a_prompt_waits_for_an_open_sweep_that_computes_most_of_it() -> None:
    harness = Harness(cost=SLOW, window=1000, blocks=100)
    decoding(harness, "runner")
    system = tuple(range(1, 33))
    harness.add("a", (*system, 40), max_tokens=1)
    harness.turn()
    harness.add("b", (*system, 41), max_tokens=1)
    harness.add("little", (*system[:8], *range(10, 40)), max_tokens=1)
    harness.turn()
    harness.scheduler.abort("runner")
    harness.run()
    # "little" would save too little; it only waits for the small sweep, like everybody.
    assert rows(harness)[1:] == [["a"], ["b", "little"]]
    assert [row.start for row in harness.opened()[-1].rows] == [32, 8]


def test_a_small_prompt_waits_for_a_long_sweep_that_computes_most_of_it() -> None:
    harness = Harness(cost=SLOW, window=1000, blocks=300)
    decoding(harness, "runner")
    system = tuple(n % 50 for n in range(200))
    harness.add("a", (*system, *range(49, 0, -1), *range(50)), max_tokens=1)
    harness.turn()
    harness.add("b", (*system, 9, 9), max_tokens=1)
    while not harness.events["b"]:
        harness.turn()
    assert rows(harness)[1:] == [["a"], ["b"]]
    assert [row.start for row in harness.opened()[-1].rows] == [200]


def test_what_each_of_several_sweeps_computed_can_be_reused_before_the_last() -> None:
    harness = Harness(window=32, blocks=200, small=8, cost=SLOW)
    decoding(harness, "runner")
    long = tuple(n % 50 for n in range(200))
    harness.add("long", long, max_tokens=1)
    harness.add("part", (*long[:32], 49, 48, 47), max_tokens=1)
    while not harness.events["part"]:
        harness.turn()
    assert not harness.events["long"]
    part = [row for plan in harness.opened() for row in plan.rows if row.id == "part"]
    assert [(row.start, len(row.tokens)) for row in part] == [(32, 3)]


def test_the_wait_ends_when_the_one_computing_leaves() -> None:
    harness = Harness(cost=SLOW)
    decoding(harness, "runner")
    prompt = tuple(range(1, 22))
    harness.add("a", prompt, max_tokens=1)
    harness.add("b", prompt, max_tokens=1)
    harness.add("other", 9, max_tokens=1)
    harness.turn()
    assert rows(harness)[-1] == ["a", "other"]
    harness.scheduler.abort("a")
    harness.scheduler.abort("runner")
    harness.run()
    assert rows(harness)[-1] == ["b"]
    harness.check_finished("b")


def test_without_prefix_caching_nobody_waits() -> None:
    harness = Harness(prefix_caching=False)
    for choice in range(3):
        harness.add(f"c{choice}", tuple(range(20)), max_tokens=1)
    harness.run()
    assert rows(harness) == [["c0", "c1", "c2"]]


def test_prompt_logprobs_bypass_reuse_and_come_in_one_piece() -> None:
    harness = Harness(window=16)
    harness.add("a", tuple(range(40)), max_tokens=1)
    harness.run()
    harness.add("b", tuple(range(40)), max_tokens=2, prompt_logprobs=0, logprobs=2)
    harness.run()
    assert harness.events["b"][0].timing.cached_tokens == 0
    assert len(harness.events["b"][0].prompt_logprobs) == 40
    harness.check_finished("b")


def test_prompt_logprobs_of_a_prompt_that_gave_way_halfway_are_not_told_twice() -> None:
    harness = Harness(blocks=14, window=16, cost=Cost(layer=0.1))
    harness.add("a", 7, max_tokens=24)
    while not harness.events["a"]:
        harness.turn()
    harness.add("b", 30, max_tokens=2, prompt_logprobs=0)
    harness.run()
    assert harness.events["b"][-1].timing.preemptions == 1
    assert [row.start for plan in harness.opened() for row in plan.rows if row.id == "b"] == [
        0,
        16,
        0,
        16,
    ]
    harness.check_finished("b")


def test_no_tokens_at_all_when_only_the_prompt_is_scored() -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3), max_tokens=0, prompt_logprobs=0, eos_token_ids=(3,))
    harness.run()
    (event,) = harness.events["a"]
    assert (event.token_ids, event.finish) == ((), Finish.LENGTH)
    assert len(event.prompt_logprobs) == 3
    assert harness.scheduler.stats().generation_tokens == 0


# Giving way


def test_the_newest_of_the_lowest_priority_gives_way() -> None:
    harness = Harness(blocks=12, window=256)
    harness.add("low", 10, max_tokens=20, priority=1)
    harness.turn()
    harness.add("old", 10, max_tokens=20)
    harness.turn()
    harness.add("new", 10, max_tokens=20)
    harness.run()
    for id in harness.requests:
        harness.check_finished(id)
    preemptions = {id: harness.events[id][-1].timing.preemptions for id in harness.requests}
    assert preemptions["old"] == 0
    assert preemptions["low"] >= 1
    assert harness.scheduler.stats().preemptions == sum(preemptions.values())
    assert harness.scheduler.stats().prompt_tokens == 30


def test_one_that_gave_way_keeps_its_place_in_line() -> None:
    harness = Harness(blocks=8, window=256)
    harness.add("a", 10, max_tokens=14)
    harness.add("b", 10, max_tokens=10)
    harness.turn()
    harness.add("c", 10, max_tokens=2)
    harness.run()
    assert rows(harness) == [["a", "b"], ["b"], ["c"]]
    for id in harness.requests:
        harness.check_finished(id)


def test_one_that_gives_way_inside_a_sweep_is_dropped_from_it() -> None:
    harness = Harness(blocks=8, window=256, cost=Cost(layer=0.1))
    harness.add("a", 7, max_tokens=16)
    while not harness.events["a"]:
        harness.turn()
    harness.add("b", 20, max_tokens=2)
    harness.turn()
    number = harness.opened()[-1].number
    while harness.scheduler.stats().preemptions == 0:
        harness.turn()
    dropped = [plan.dropped for plan in harness.plans if plan.dropped]
    assert dropped == [((number, "b"),)]
    assert harness.scheduler.update_sweep(number, [Sampled("b", 1)], 0.0, 0.0) == []
    harness.run()
    harness.check_finished("a")
    harness.check_finished("b")
    assert harness.events["b"][-1].timing.preemptions == 1


def test_one_that_outgrows_the_pool_alone_ends_with_length() -> None:
    harness = Harness(blocks=4)
    harness.add("a", 10, max_tokens=100)
    harness.add("b", 3, max_tokens=2)
    harness.run()
    assert len(harness.tokens("a")) == 4 * 4 - 10 + 1
    harness.check_finished("a")
    harness.check_finished("b")


# Ends


def test_the_context_ends_it() -> None:
    harness = Harness(max_model_len=12)
    harness.add("a", 10, max_tokens=100)
    harness.run()
    assert len(harness.tokens("a")) == 2
    harness.check_finished("a")


def sampled_once(harness: Harness, token: int, **sampling: object) -> None:
    """Let "a" sample `token` first."""
    harness.add("a", 3, max_tokens=5, **sampling)
    plan = harness.scheduler.schedule(0.0, 0.01)
    assert plan is not None
    assert plan.advance is not None
    harness.take(harness.scheduler.update_sweep(plan.advance, [Sampled("a", token)], 1.0, 0.0))


@pytest.mark.parametrize(
    ("eos", "stops", "finish", "stop_token"),
    [
        ((9,), (), Finish.STOP, None),
        ((), (9,), Finish.STOP, 9),
        ((9,), (9,), Finish.STOP, None),
        ((8,), (7,), None, None),
    ],
)
def test_ends_by_token(
    eos: tuple[int, ...], stops: tuple[int, ...], finish: Finish | None, stop_token: int | None
) -> None:
    harness = Harness()
    sampled_once(harness, 9, eos_token_ids=eos, stop_token_ids=stops)
    (event,) = harness.events["a"]
    assert (event.token_ids, event.finish, event.stop_token) == ((9,), finish, stop_token)


@pytest.mark.parametrize(
    ("token", "sampling", "words"),
    [
        (9, {"eos_token_ids": (9,), "min_tokens": 1}, "before min_tokens"),
        (9, {"stop_token_ids": (9,), "min_tokens": 1}, "before min_tokens"),
        (50, {}, "vocabulary of 50"),
        (-1, {}, "vocabulary of 50"),
    ],
)
def test_a_token_that_cannot_be_ends_that_sequence_alone(
    token: int, sampling: dict[str, object], words: str
) -> None:
    harness = Harness()
    sampled_once(harness, token, **sampling)
    (event,) = harness.events["a"]
    assert event.finish is Finish.ERROR
    assert words in str(event.error)
    assert event.token_ids == ()
    assert event.timing is not None
    assert harness.kv.stats().blocks_used == 0


def test_a_row_without_a_result_is_an_error() -> None:
    harness = Harness()
    harness.add("a", 3)
    plan = harness.scheduler.schedule(0.0, 0.01)
    assert plan is not None
    assert plan.advance is not None
    (event,) = harness.scheduler.update_sweep(plan.advance, [], 1.0, 0.0)
    assert event.finish is Finish.ERROR


def test_an_error_in_one_row_leaves_the_others_alone() -> None:
    harness = Harness()
    for id in "abc":
        harness.add(id, 5, max_tokens=6)
    harness.turn()
    harness.executor.poisoned.add("b")
    harness.run()
    harness.check_finished("a")
    harness.check_finished("c")
    assert "not finite" in str(harness.events["b"][-1].error)
    assert harness.scheduler.stats().finished["error"] == 1


def test_an_error_in_the_first_of_several_sweeps_ends_it() -> None:
    harness = Harness(window=16)
    harness.add("a", 40)
    harness.executor.poisoned.add("a")
    harness.run()
    assert len(harness.opened()) == 1
    assert harness.events["a"][-1].error == "the hidden states are not finite"


def test_one_that_does_not_fit_after_all_goes_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    for id in "abc":
        harness.add(id, 5)
    start = harness.kv.start
    with monkeypatch.context() as patch:
        patch.setattr(
            harness.kv, "start", lambda id, chain: start(id, chain) if id == "a" else None
        )
        harness.turn()
    harness.run()
    assert rows(harness) == [["a"], ["b", "c"]]
    for id in "abc":
        harness.check_finished(id)


def test_a_failed_sweep_is_closed() -> None:
    harness = Harness(cost=SLOW)
    decoding(harness, "runner")
    harness.add("a", 5)
    harness.add("b", 5)
    harness.turn()
    number = harness.opened()[-1].number
    events = harness.scheduler.fail(["a", "b", "a"], "out of memory", harness.now)
    assert [(event.id, event.error) for event in events] == [
        ("a", "out of memory"),
        ("b", "out of memory"),
    ]
    harness.take(events)
    plan = harness.turn()
    assert plan is not None
    assert plan.advance is None
    assert plan.dropped == ((number, "a"), (number, "b"))
    assert plan.released == ("a", "b")


@pytest.mark.parametrize("state", ["queued", "sweeping", "paused", "decoding", "finished"])
def test_abort_in_every_state_gives_the_blocks_back_at_once(state: str) -> None:
    harness = Harness(seqs=1, window=16, cost=SLOW)
    harness.executor.interrupt = lambda now: state == "sweeping"
    if state == "queued":
        decoding(harness, "other")
    used = harness.kv.stats().blocks_used
    harness.add("a", 24 if state == "paused" else 6, max_tokens=1 if state == "finished" else 9)
    harness.turn()
    if state == "decoding":
        harness.turn()
    for _ in range(2):
        harness.scheduler.abort("a")
        harness.scheduler.check()
        assert harness.kv.stats().blocks_used == used
    ended = harness.scheduler.stats().finished
    assert (ended["abort"], ended["length"]) == ((0, 1) if state == "finished" else (1, 0))
    plan = harness.turn()
    assert plan is not None
    assert plan.released == ("a",)
    assert bool(plan.dropped) == (state == "sweeping")
    harness.scheduler.abort("other")
    harness.run()


def test_an_id_may_come_back() -> None:
    harness = Harness()
    harness.add("a", 6, max_tokens=9)
    harness.turn()
    plan = harness.scheduler.schedule(harness.now, 0.01)
    assert plan is not None
    assert plan.decode is not None
    harness.scheduler.abort("a")
    harness.add("a", 5, max_tokens=3)
    stale = [Sampled("a", 1)]
    assert harness.scheduler.update_decode(plan.decode, stale, harness.now, 0.0) == []
    again = harness.turn()
    assert again is not None
    assert again.opened is not None
    assert again.released == ()
    harness.run()
    harness.check_finished("a")


def test_a_late_result_is_not_taken_for_a_newcomer_with_the_same_id() -> None:
    harness = Harness()
    decoding(harness, "a")
    plan = harness.scheduler.schedule(harness.now, 0.01)
    assert plan is not None
    assert plan.decode is not None
    harness.scheduler.abort("a")
    harness.turn()
    harness.add("a", 9, max_tokens=3)
    harness.turn()
    assert harness.scheduler.stats().decoding == 1
    assert harness.scheduler.update_decode(plan.decode, [Sampled("a", 1)], 0.0, 0.0) == []
    harness.run()
    harness.check_finished("a")


def test_tokens_of_an_earlier_life_count_but_are_not_told_again() -> None:
    harness = Harness()
    whole = harness.add("whole", (1, 2, 3, 4, 5), max_tokens=12)
    harness.run()
    told = harness.tokens("whole")
    harness.add("rest", whole.prompt, max_tokens=12, generated=told[:7], logprobs=0)
    harness.run()
    assert harness.tokens("rest") == told[7:]
    assert harness.events["rest"][0].timing.cached_tokens == 5  # more was reused, but no prompt
    harness.check_finished("rest")
    assert harness.scheduler.stats().prompt_tokens == 10


def test_timing_and_statistics() -> None:
    harness = Harness(cost=Cost(step=1.0, layer=0.5, layers=4))
    harness.executor.now = 10.0
    harness.add("a", (1, 2, 3, 4, 5, 6, 7, 8), max_tokens=3)
    harness.executor.now = 11.0
    harness.run()
    first, last = harness.events["a"][0].timing, harness.events["a"][-1].timing
    assert first is not None
    assert last is not None
    assert (first.queued, first.prefill, first.decode) == (1.0, 2.0, 0.0)
    assert (last.queued, last.prefill, last.decode) == (1.0, 2.0, 2.0)
    assert (first.exposed_fetch, last.exposed_fetch) == pytest.approx((0.002, 0.004))
    harness.add("b", (1, 2, 3, 4, 5, 6, 7, 8), max_tokens=1)
    harness.run()
    (event,) = harness.events["b"]
    assert event.timing is not None
    assert event.timing.cached_tokens == 4
    stats = harness.scheduler.stats()
    assert (stats.prompt_tokens, stats.swept_tokens, stats.generation_tokens) == (16, 12, 4)
    assert (stats.decode_steps, stats.sweeps) == (2, 2)
    assert stats.finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}


def test_check_sees_what_is_wrong() -> None:
    harness = Harness()
    decoding(harness, "a")
    harness.kv.free("a")
    with pytest.raises(AssertionError):
        harness.scheduler.check()


# Sequences whose grammar is not compiled yet


def test_a_held_one_keeps_its_place_and_nobody_waits_for_it() -> None:
    harness = Harness(seqs=1)
    harness.add("held", 5, max_tokens=2, held=True)
    assert harness.turn() is None
    assert not harness.scheduler.idle
    assert harness.scheduler.stats().waiting == 1
    harness.add("first", 5, max_tokens=2)
    harness.add("second", 5, max_tokens=2)
    harness.turn()
    harness.ready("held")
    harness.run()
    assert rows(harness) == [["first"], ["held"], ["second"]]
    for id in harness.requests:
        harness.check_finished(id)


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_a_held_one_may_end(end: str) -> None:
    harness = Harness()
    harness.add("a", 5, held=True)
    if end == "abort":
        harness.scheduler.abort("a")
    else:
        (event,) = harness.scheduler.fail(["a"], "no such type", 1.0)
        assert (event.finish, event.error) == (Finish.ERROR, "no such type")
    harness.ready("a")
    harness.run()
    assert harness.opened() == []


def test_a_complete_grammar_ends_a_sequence() -> None:
    harness = Harness()
    decoding(harness, "a")
    plan = harness.scheduler.schedule(harness.now, 0.01)
    assert plan is not None
    assert plan.decode is not None
    done = [Sampled("a", 1, complete=True)]
    (event,) = harness.scheduler.update_decode(plan.decode, done, 1.0, 0.0)
    assert (event.token_ids, event.finish, event.stop_token) == ((1,), Finish.STOP, None)
    assert harness.scheduler.stats().finished["stop"] == 1


def test_min_tokens_gives_way_to_a_grammar() -> None:
    harness = Harness()
    grammar = Grammar("regex", "a")
    for id, more in (("a", {"grammar": grammar}), ("b", {})):
        harness.add(id, 5, max_tokens=9, min_tokens=4, eos_token_ids=(2,), **more)
        number = harness.scheduler.schedule(0.0, 0.01).opened.number
        (event,) = harness.scheduler.update_sweep(number, [Sampled(id, 2)], 1.0, 0.0)
        assert event.finish is (Finish.STOP if more else Finish.ERROR)
