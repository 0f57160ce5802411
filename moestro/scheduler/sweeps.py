"""The open sweeps: who is in them, whose turn it is, and which blocks they will publish.

Owns: at most two open sweeps, a long one and a small one that overtakes it. Does not own: who
gets into them (`scheduler.filling`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moestro.scheduler.plan import SweepPlan, SweepRow
from moestro.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Run:
    """One row of a sweep and the sequence it belongs to."""

    seq: Sequence
    row: SweepRow
    promised: tuple[bytes, ...]  # keys of the blocks it fills: published when the sweep is done

    @property
    def end(self) -> int:
        """Leading tokens of the sequence that are computed when this run is."""
        return self.row.start + len(self.row.tokens)


@dataclass(slots=True, eq=False)
class OpenSweep:
    """A sweep on its way up. `runs` are those still in it."""

    plan: SweepPlan
    small: bool
    runs: dict[str, Run]


class Sweeps:
    """The long and the small open sweep."""

    def __init__(self) -> None:
        self._open: dict[int, OpenSweep] = {}
        self._promised: Counter[bytes] = Counter()
        self._last_turn = -1
        self._opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def is_free(self, *, small: bool) -> bool:
        """True when a sweep of that kind can be opened."""
        return all(sweep.small is not small for sweep in self._open.values())

    def promises(self, key: bytes) -> bool:
        """True while an open sweep computes the block with this key."""
        return key in self._promised

    def open(self, runs: Iterable[Run], *, small: bool) -> SweepPlan:
        """Open a sweep with `runs`."""
        assert self.is_free(small=small), small
        self._opened += 1
        by_id = {run.row.id: run for run in runs}
        plan = SweepPlan(self._opened, tuple(run.row for run in by_id.values()))
        self._open[plan.number] = OpenSweep(plan, small, by_id)
        for run in by_id.values():
            run.seq.sweep = plan.number
            self._promised.update(run.promised)
        return plan

    def leave(self, seq: Sequence) -> int | None:
        """Take `seq` out of its sweep and return the number; a sweep left empty is closed."""
        number, seq.sweep = seq.sweep, None
        if number is None:
            return None
        self._settle(self._open[number].runs.pop(seq.id))
        if not self._open[number].runs:
            del self._open[number]
        return number

    def close(self, number: int) -> list[Run]:
        """The sweep is at the top: the runs still in it. Empty for a number that is not open."""
        sweep = self._open.pop(number, None)
        if sweep is None:
            return []
        for run in sweep.runs.values():
            run.seq.sweep = None
            self._settle(run)
        return list(sweep.runs.values())

    def turn(self) -> int | None:
        """The sweep to advance now: the two take turns, so that neither starves."""
        others = [number for number in self._open if number != self._last_turn]
        if others or not self._open:
            self._last_turn = others[0] if others else -1
        return self._last_turn if self._open else None

    def check(self) -> None:
        """Raise AssertionError unless members, kinds and promises agree."""
        kinds = [sweep.small for sweep in self._open.values()]
        assert len(set(kinds)) == len(kinds), kinds
        promised: Counter[bytes] = Counter()
        for number, sweep in self._open.items():
            assert sweep.runs, f"sweep {number} is empty"
            for run in sweep.runs.values():
                assert run.seq.sweep == number, (run.seq.id, run.seq.sweep, number)
                promised.update(run.promised)
        assert promised == self._promised, "promised blocks and open sweeps differ"

    def _settle(self, run: Run) -> None:
        for key in run.promised:
            self._promised[key] -= 1
            if not self._promised[key]:
                del self._promised[key]
