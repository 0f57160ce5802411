"""Nobody waits for ever, and a stream's gaps are short: timed by a clock that only work moves."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.scheduler.fakes import Cost, Harness

COST = Cost(step=0.020, layer=0.008, layer_token=0.00001, layers=24)
WINDOW = 2048  # so a small sweep has up to 256 tokens


def harness(**limits: int) -> Harness:
    return Harness(
        **{"window": WINDOW, "blocks": 8000, "max_model_len": 50_000, "seqs": 64, **limits},
        cost=COST,
    )


def first_token(harness: Harness, id: str, limit: float = 1e9) -> float:
    """Turn until `id` has its first token; seconds since it arrived."""
    while not harness.events[id]:
        harness.turn()
        assert harness.now - harness.arrived[id] < limit, f"{id} waits for too long"
    return harness.now - harness.arrived[id]


def largest_gap(harness: Harness, id: str) -> float:
    times = harness.times[id]
    return max(after - before for before, after in pairwise(times))


def test_a_long_prompt_does_not_stall_a_stream() -> None:
    both = harness()
    both.add("stream", 10, max_tokens=400)
    first_token(both, "stream")
    both.add("long", 8192)
    first_token(both, "long")
    assert largest_gap(both, "stream") < 5 * COST.step


def test_long_and_short_prompts_together_do_not_stall_a_stream() -> None:
    crowd = harness()
    crowd.add("stream", 10, max_tokens=600)
    first_token(crowd, "stream")
    crowd.add("long", 6000)
    for number in range(40):
        crowd.add(f"s{number}", 30 + number, max_tokens=3)
        crowd.turn()
    first_token(crowd, "long")
    assert largest_gap(crowd, "stream") < 5 * COST.step


@pytest.mark.parametrize("output", [1, 40])
@pytest.mark.parametrize("length", [1500, 6000])
def test_a_flood_of_short_prompts_does_not_stop_a_long_one(length: int, output: int) -> None:
    alone = harness()
    alone.add("stream", 10, max_tokens=10_000)  # so that both sweep in slices
    first_token(alone, "stream")
    alone.add("long", length)
    best = first_token(alone, "long")

    crowd = harness()
    crowd.add("stream", 10, max_tokens=10_000)
    first_token(crowd, "stream")
    for number in range(8):
        crowd.add(f"early{number}", 40, max_tokens=output)
    crowd.add("long", length)
    for number in range(10_000):
        crowd.add(f"s{number}", 40, max_tokens=output)
        crowd.turn()
        if crowd.events["long"]:
            break
    assert crowd.now - crowd.arrived["long"] < 2.5 * best


def test_a_flood_of_guests_does_not_stop_their_host() -> None:
    alone = harness()
    alone.add("host", 12_000)
    best = first_token(alone, "host")

    crowd = harness(blocks=200_000, seqs=1000)
    crowd.add("host", 12_000)
    for number in range(10_000):
        crowd.add(f"g{number}", 700, max_tokens=1)
        crowd.turn()
        if crowd.events["host"]:
            break
    assert crowd.now - crowd.arrived["host"] < 2.5 * best


def test_a_flood_cannot_keep_a_long_prompt_out_of_a_small_pool() -> None:
    crowd = harness(blocks=128, seqs=32, queued=10_000)
    for number in range(200):
        crowd.add(f"s{number}", 40, max_tokens=20)
        if number == 40:
            crowd.add("long", 450, max_tokens=2)
    last_before = 0.0
    while not crowd.events["long"]:
        crowd.turn()
        last_before = crowd.now
    passed = [id for id in crowd.requests if id.startswith("s") and crowd.events[id]]
    assert last_before > 0
    assert len(passed) < 80  # those before it, and few of those behind
    crowd.run()
    for id in crowd.requests:
        crowd.check_finished(id)


@pytest.mark.parametrize("streams", [0, 1])
@pytest.mark.parametrize("length", [1500, 12_000])
def test_a_long_prompt_does_not_hold_up_a_short_one(length: int, streams: int) -> None:
    alone = harness()
    for number in range(streams):
        alone.add(f"stream{number}", 10, max_tokens=10_000)
        first_token(alone, f"stream{number}")
    alone.add("short", 40)
    best = first_token(alone, "short")

    both = harness()
    for number in range(streams):
        both.add(f"stream{number}", 10, max_tokens=10_000)
        first_token(both, f"stream{number}")
    both.executor.interrupt = lambda now: "short" not in both.events
    both.add("long", length)
    both.turn()
    both.add("short", 40)
    assert first_token(both, "short") < 2.5 * best + 0.1
    assert not both.events["long"]


def test_a_prompt_over_the_window_does_not_hold_up_a_middle_one_for_its_whole_length() -> None:
    both = harness()
    both.add("host", 20_000)
    both.turn()
    both.add("middle", 900)
    first_token(both, "middle")
    assert not both.events["host"]
    host_rows = [row for plan in both.opened() for row in plan.rows if row.id == "host"]
    assert len(host_rows) <= 2


def test_small_sweeps_do_not_starve_lower_places_in_line() -> None:
    crowd = harness(seqs=4, queued=1000)
    for number in range(60):
        crowd.add(f"s{number}", 20 + number % 7, max_tokens=5)
    crowd.run()
    starts = [crowd.times[f"s{number}"][0] for number in range(60)]
    assert starts == sorted(starts)
