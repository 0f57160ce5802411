"""What a GPU may do to the slots in its next step, as the host sees it beforehand.

Owns: the list of slots in the order in which they may be taken, which keys may take them, and the
memory of what a step under way may have taken. Does not own: the tables, or how the lists get to
the device. No torch.
"""

from __future__ import annotations

import numpy as np

from moestro.expert_cache.policy import Bools, Ints
from moestro.expert_cache.residency import Residency
from moestro.expert_cache.slot_table import FREE

IDLE = 2  # passes; an expert used more recently is in the working set
SLACK = 16  # victims beyond those of the last step that the next one may take, at most
SHARE = 8  # or one of so many slots, if that is less


class Victims:
    """The lists of one cache, made anew for each step."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._taken = np.zeros(0, np.int64)  # slots that a launched step may have taken

    def settle(self) -> None:
        """No step is under way."""
        self._taken = np.zeros(0, np.int64)

    def lists(self, misses: int, kept: int) -> tuple[Ints, Bools]:
        """All slots, first to be taken first, and for each key whether it may take one. The last
        step that is known missed `misses` experts and gave slots to `kept` of them."""
        residency, policy = self._residency, self._residency.policy
        owner = residency.table.owner
        free = np.flatnonzero(owner == FREE)
        held = np.flatnonzero(owner >= 0)
        order = held[policy.rank(owner[held], residency.clock)]
        if residency.crowded and not policy.steady:
            idle = residency.idle(owner[order], IDLE)
            order = np.concatenate((order[idle], order[~idle]))
        order = np.concatenate((free, order))
        worst = int(owner[order[min(len(order) - 1, misses // 2)]])
        # A step that is under way takes from the list it was given: these come last now.
        mine = np.isin(order, self._taken)
        order = np.concatenate((order[~mine], order[mine]))
        self._taken = order[: kept + max(1, min(SLACK, len(order) // SHARE))]
        keys = len(residency.table.slot_of)
        if worst < 0:
            return order, np.ones(keys, np.bool_)
        return order, policy.admits(np.arange(keys), worst, residency.clock)
