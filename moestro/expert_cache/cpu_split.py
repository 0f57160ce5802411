"""How many of a layer's missing experts the host's processor computes, and how many cross the link.

Owns: the two rates as measured while serving, and the table that the device looks the answer up in.
Does not own: which experts those are (`kernels.gpu.acquire`), or the computing.

With m missing experts, c of them on the CPU, a layer waits for the later of the two sides. Both
rates come from live steps, so a busy or slow processor loses its share, down to none; then single
steps try it again from time to time.
"""

from __future__ import annotations

import numpy as np

from moestro.expert_cache.policy import Floats, Ints

FIRST_LINK, FIRST_CPU = 50e9, 20e9  # bytes/s, before anything is measured
FIRST_DELAY = 20e-6  # s from the post until the worker has begun, and back
SMOOTHING = 0.1  # weight of a step's figures
LATE = 2e-6  # s of waiting from which the CPU was the later side
DRIFT = 0.04  # a table stays until a rate has moved by this much
# A share is worth giving if the layer takes at most so much of the time over the link alone. A
# single miss is different: what comes over the link renews the cache.
WORTH, WORTH_ONE = 0.93, 0.5
TRY_AGAIN = 256  # steps without any share after which one step tries
PATIENCE = 4096  # the same after the worker had not answered


class CpuSplit:
    """`share[m]`, int64 [experts + 1]: of m missing experts of a layer so many go to the CPU."""

    def __init__(self, experts: int, expert_bytes: int) -> None:
        self._experts = experts
        self._bytes = expert_bytes
        self.link = FIRST_LINK  # bytes/s
        self.cpu = FIRST_CPU
        self.delay = FIRST_DELAY  # s
        self._made_for = (0.0, 0.0, 0.0)
        self._without = 0  # steps since a share was given
        self._patience = TRY_AGAIN
        self.share: Ints = np.zeros(experts + 1, np.int64)
        self._update()

    def observe(
        self,
        fetched: Ints,
        fetching: Floats,
        computed: Ints,
        computing: Floats,
        waited: Floats,
        until_answer: Floats,
    ) -> None:
        """Learn from one step. For each layer: experts over the link and the seconds they took,
        the same for the CPU, the seconds that the device only waited for the CPU, and the seconds
        from the misses being known to its answer being seen."""
        if total := int(fetched.sum()):
            self.link = _towards(self.link, total * self._bytes / max(fetching.sum(), 1e-9))
        if total := int(computed.sum()):
            self._without, self._patience = 0, TRY_AGAIN
            self.cpu = _towards(self.cpu, total * self._bytes / max(computing.sum(), 1e-9))
            # Only where the device had to wait is the delay known. A step without any such layer
            # makes us bolder, until one is late.
            late = (computed > 0) & (waited > LATE)
            beyond = until_answer[late] - computing[late] if late.any() else np.zeros(1)
            bounded = beyond.clip(0.0, FIRST_DELAY + 4 * self.delay)  # one mishap is not a habit
            self.delay = _towards(self.delay, float(bounded.mean()))
        else:
            self._without += 1
        self._update()

    def stalled(self) -> None:
        """The worker did not answer: no share for a while."""
        self.share = np.zeros(self._experts + 1, np.int64)
        self._without, self._patience = 0, PATIENCE
        self._made_for = (0.0, 0.0, 0.0)

    def _update(self) -> None:
        if self._without and self._without % self._patience == 0:
            # For one step, where a CPU at rest could pay: little experts never go there.
            could = self._table(self.link, max(self.cpu, FIRST_CPU), FIRST_DELAY)
            self.share = np.maximum(self.share, np.minimum(could, 1))
            self._made_for = (0.0, 0.0, 0.0)
            return
        if self._patience == PATIENCE:
            return
        now = (self.link, self.cpu, self.delay)
        if all(abs(a - b) <= DRIFT * b for a, b in zip(now, self._made_for, strict=True)):
            return
        self._made_for = now
        self.share = self._table(*now)

    def _table(self, link: float, cpu: float, delay: float) -> Ints:
        """The share that ends soonest with these rates, for each number of missing experts."""
        missing = np.arange(self._experts + 1)[:, None]
        here = np.arange(self._experts + 1)[None, :]
        by_link = (missing - here) * (self._bytes / link)
        by_cpu = np.where(here > 0, delay + here * (self._bytes / cpu), 0.0)
        both = np.where(here <= missing, np.maximum(by_link, by_cpu), np.inf)
        best = both.argmin(1)
        gain = both.min(1) / np.maximum(by_link[:, 0], 1e-12)
        limit = np.where(missing[:, 0] == 1, WORTH_ONE, WORTH)
        return np.where(gain <= limit, best, 0)


def _towards(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)
