"""Anything may happen at any time; every request that is left alone ends as it would alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moestro.errors import ContextTooLong
from moestro.kv_cache.groups import group_layers
from moestro.kv_cache.spec import LayerMemory, PagedKV, WindowKV
from moestro.types import Finish
from tests.scheduler.fakes import Cost, Harness

FAMILIES = st.lists(st.integers(0, 1), min_size=1, max_size=30).map(tuple)
PIECES = st.lists(st.sampled_from([(1, 2, 3, 4), (5, 6, 7, 8), (1, 2)]), min_size=1, max_size=8)
PROMPTS = st.one_of(FAMILIES, PIECES.map(lambda pieces: sum(pieces, ())))


FULL, WINDOW = PagedKV(1, 1, 1, 1, 4), WindowKV(1, 1, 1, 1, 4, window=6)
KINDS = [(FULL,), (FULL, WINDOW), (WINDOW,)]  # of layers


class SchedulerMachine(RuleBasedStateMachine):
    """Small pools, small windows, common prefixes."""

    @initialize(
        blocks=st.integers(4, 16),
        seqs=st.integers(1, 6),
        window=st.sampled_from([3, 8, 20, 300]),
        caching=st.booleans(),
        layers=st.integers(1, 12),
        ahead=st.booleans(),
        kinds=st.sampled_from(KINDS),
    )
    def build(
        self,
        blocks: int,
        seqs: int,
        window: int,
        caching: bool,
        layers: int,
        ahead: bool,
        kinds: tuple[LayerMemory, ...],
    ) -> None:
        self.harness = Harness(
            blocks=blocks,
            seqs=seqs,
            queued=1000,
            window=window,
            prefix_caching=caching,
            small=max(1, window // 3),
            cost=Cost(layer=0.005, layers=layers),
            ahead=ahead,
            groups=group_layers(kinds),
        )
        self.count = 0
        self.left: set[str] = set()  # aborted
        self.failed: set[str] = set()
        self.generated = 0
        self.prompt_tokens = 0

    def live(self) -> list[str]:
        ids = [id for id in self.harness.requests if id not in self.left]
        return [id for id in ids if not self.harness.finished(id)]

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(0, 30),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]),
        ends=st.sampled_from([(), (3,), tuple(range(0, 50, 5))]),
        stops=st.sampled_from([(), (7, 9)]),
        minimum=st.integers(0, 5),
        asks=st.sampled_from([{}, {"logprobs": 0}, {"prompt_logprobs": 0}]),
        generated=st.sampled_from([(), (), (6, 8, 11)]),
        held=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        priority: int,
        salt: str | None,
        ends: tuple[int, ...],
        stops: tuple[int, ...],
        minimum: int,
        asks: dict[str, int],
        generated: tuple[int, ...],
        held: bool = False,
    ) -> None:
        self.count += 1
        asked = {
            "eos_token_ids": ends,
            "stop_token_ids": stops,
            "min_tokens": min(minimum, max_tokens),
            "generated": generated if max_tokens > 3 else (),
            "held": held,
        }
        try:
            self.harness.add(
                f"r{self.count}", prompt, max_tokens, priority=priority, salt=salt, **asked, **asks
            )
        except ContextTooLong:
            output = 0 if asked["generated"] else min(1, max_tokens)
            assert len(prompt + asked["generated"]) + output > self.harness.limits.kv_tokens

    @rule(prompt=PROMPTS, choices=st.integers(2, 4), max_tokens=st.integers(1, 8))
    def add_choices(self, prompt: tuple[int, ...], choices: int, max_tokens: int) -> None:
        for _ in range(choices):
            self.add(prompt, max_tokens, 0, None, (), (), 0, {}, ())

    @precondition(lambda self: self.harness.held)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        """Whether it still lives or not."""
        self.harness.ready(data.draw(st.sampled_from(sorted(self.harness.held))))

    @rule()
    def turn(self) -> None:
        self.harness.turn()

    @rule(turns=st.integers(2, 12))
    def turns(self, turns: int) -> None:
        for _ in range(turns):
            self.harness.turn()

    @precondition(lambda self: self.live())
    @rule(data=st.data(), twice=st.booleans())
    def abort(self, data: st.DataObject, twice: bool) -> None:
        id = data.draw(st.sampled_from(self.live()))
        used = self.harness.kv.stats().blocks_used
        self.harness.scheduler.abort(id)
        assert self.harness.kv.stats().blocks_used <= used
        self.left.add(id)
        if twice:
            self.harness.scheduler.abort(id)
        self.harness.scheduler.check()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def step_raises(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.live()), min_size=1, max_size=3))
        events = self.harness.scheduler.fail([*ids, "nobody"], "boom", self.harness.now)
        assert sorted(event.id for event in events) == sorted(set(ids))
        assert {event.error for event in events} == {"boom"}
        self.harness.take(events)
        self.failed |= set(ids)
        self.harness.scheduler.check()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        self.harness.executor.poisoned.add(data.draw(st.sampled_from(self.live())))

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        for id in sorted(harness.held):
            harness.ready(id)
        harness.run()
        harness.scheduler.abort("nobody")
        for id in harness.requests:
            if id in self.left:
                continue
            last = harness.events[id][-1]
            if last.finish is Finish.ERROR:
                assert id in self.failed or id in harness.executor.poisoned
            else:
                harness.check_finished(id)
        self.check_stats()

    def check_stats(self) -> None:
        harness, stats = self.harness, self.harness.scheduler.stats()
        assert (stats.running, stats.decoding, stats.sweeping, stats.waiting) == (0, 0, 0, 0)
        ends = [events[-1] for events in harness.events.values() if events]
        for finish in Finish:
            count = sum(event.finish is finish for event in ends)
            assert stats.finished[finish] == (len(self.left) if finish is Finish.ABORT else count)
        assert stats.generation_tokens == sum(len(harness.tokens(id)) for id in harness.requests)
        swept = {row.id for plan in harness.opened() for row in plan.rows}
        assert stats.prompt_tokens == sum(len(harness.requests[id].prompt) for id in swept)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_in_a_pool_for_one_and_a_half(seed: int) -> None:
    harness = Harness(blocks=16, window=40)
    for number in range(3):
        harness.add(f"{seed}-{number}", 15 + number, max_tokens=30, logprobs=0)
    harness.run()
    assert harness.scheduler.stats().preemptions > 0
    for id in harness.requests:
        harness.check_finished(id)
