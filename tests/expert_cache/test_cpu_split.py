"""The share of the misses that the CPU gets, from made-up measurements."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.expert_cache.cpu_split import TRY_AGAIN, WORTH, CpuSplit

EXPERTS, SIZE, LAYERS = 32, 10_000_000, 6


class Machine:
    """Both sides as they would be with these rates, and a split that learns from them."""

    def __init__(self, link: float, cpu: float, delay: float) -> None:
        self.link, self.cpu, self.delay = link, cpu, delay
        self.split = CpuSplit(EXPERTS, SIZE)

    def times(self, missing: int, here: int) -> tuple[float, float]:
        by_cpu = self.delay + here * SIZE / self.cpu if here else 0.0
        return (missing - here) * SIZE / self.link, by_cpu

    def step(self, missing: int) -> float:
        """One step with so many misses in each layer; the seconds it took for them."""
        here = int(self.split.share[missing])
        by_link, by_cpu = self.times(missing, here)
        rows = np.ones(LAYERS)
        self.split.observe(
            (rows * (missing - here)).astype(np.int64),
            rows * by_link,
            (rows * here).astype(np.int64),
            rows * (here * SIZE / self.cpu),
            rows * max(0.0, by_cpu - by_link),
            rows * max(by_cpu, by_link),
        )
        return LAYERS * max(by_link, by_cpu)

    def settle(self, missing: int = 12, steps: int = 200) -> None:
        for _ in range(steps):
            self.step(missing)


rates = st.floats(2e9, 2e11)


@settings(max_examples=60, deadline=None)
@given(link=rates, cpu=rates, delay=st.floats(0, 2e-3), missing=st.integers(1, EXPERTS))
def test_the_share_ends_near_the_best_and_is_never_slower_than_the_link(
    link: float, cpu: float, delay: float, missing: int
) -> None:
    machine = Machine(link, cpu, delay)
    machine.settle(missing)
    share = machine.split.share
    assert (share <= np.arange(EXPERTS + 1)).all()
    alone = missing * SIZE / link
    took = max(machine.times(missing, int(share[missing])))
    assert took <= 1.02 * alone
    best = min(max(machine.times(missing, here)) for here in range(missing + 1))
    if missing >= 8 and best < 0.7 * alone:
        assert took < 1.5 * best


def test_a_cpu_that_becomes_slow_loses_its_share_and_gets_it_back() -> None:
    machine = Machine(5e10, 1e11, 2e-5)
    machine.settle()
    assert machine.split.share[12] in (7, 8)
    machine.cpu, machine.delay = 2e9, 5e-3
    machine.settle()
    alone = 12 * SIZE / machine.link
    assert machine.split.share[12] == 0
    spent = sum(machine.step(12) for _ in range(4 * TRY_AGAIN))
    assert spent <= 1.03 * 4 * TRY_AGAIN * LAYERS * alone  # trying again costs little
    machine.cpu, machine.delay = 1e11, 2e-5
    machine.settle(steps=40 * TRY_AGAIN)
    assert machine.split.share[12] in (7, 8)


def test_one_slow_answer_changes_little() -> None:
    machine = Machine(5e10, 1e11, 2e-5)
    machine.settle()
    before = machine.split.share.copy()
    machine.delay = 1.0
    machine.step(12)
    machine.delay = 2e-5
    machine.settle(steps=60)
    assert abs(int(machine.split.share[12]) - int(before[12])) <= 1


def test_a_single_miss_goes_over_the_link_unless_the_cpu_is_twice_as_fast() -> None:
    for cpu, expected in ((8e10, 0), (2e11, 1)):
        machine = Machine(5e10, cpu, 0.0)
        machine.settle()
        assert machine.split.share[1] == expected
    assert WORTH < 1


def test_no_answer_takes_the_share_away_for_long() -> None:
    machine = Machine(5e10, 1e11, 2e-5)
    machine.settle()
    machine.split.stalled()
    for _ in range(8 * TRY_AGAIN):
        machine.step(12)
        assert not machine.split.share.any()
    machine.settle(steps=20 * TRY_AGAIN)
    assert machine.split.share[12] in (7, 8)


def test_little_experts_are_never_tried() -> None:
    split = CpuSplit(EXPERTS, 4096)
    some, times = np.full(LAYERS, 4), np.full(LAYERS, 1e-6)
    for _ in range(3 * TRY_AGAIN):
        split.observe(some, times, 0 * some, 0 * times, 0 * times, 0 * times)
        assert not split.share.any()
