"""How long a turn may sweep."""

from __future__ import annotations

import pytest

from moestro.scheduler.pace import GAP_STEPS, LEAST_STEPS, SHORTEST_SLICE, sweep_budget


@pytest.mark.parametrize("beside", [0.0, 0.01, 0.015, 0.02, 0.1])
def test_a_step_and_its_sweep_stay_within_the_gap(beside: float) -> None:
    budget = sweep_budget(decoding=True, open_sweeps=1, step_seconds=0.01, beside_seconds=beside)
    assert budget is not None
    least = LEAST_STEPS * 0.01
    assert budget >= least
    assert budget == pytest.approx(max(least, GAP_STEPS * 0.01 - max(beside, 0.01)))


def test_alone_a_sweep_runs_until_it_is_done_and_two_take_turns() -> None:
    arguments = {"step_seconds": 0.01, "beside_seconds": 0.0}
    assert sweep_budget(decoding=False, open_sweeps=1, **arguments) is None
    assert sweep_budget(decoding=False, open_sweeps=2, **arguments) == pytest.approx(0.05)


def test_before_the_first_step_is_measured_there_is_still_progress() -> None:
    budget = sweep_budget(decoding=True, open_sweeps=1, step_seconds=0.0, beside_seconds=0.0)
    assert budget == SHORTEST_SLICE
