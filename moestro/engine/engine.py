"""The body of the engine: one turn at a time, synchronously.

Owns: the order of a turn (forget, open, decode, advance), the clock, and what happens when a step
raises. Does not own: decisions (`scheduler`), tensors (`engine.executor`), messages
(`engine.process`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from moestro.engine.executor import Executor
from moestro.engine.messages import EngineInfo
from moestro.expert_cache.cache import ExpertCache
from moestro.kv_cache.manager import KVManager
from moestro.scheduler.plan import DecodePlan, SweepPlan
from moestro.scheduler.scheduler import Scheduler
from moestro.stats import EngineStats
from moestro.types import Request, TokenEvent

log = logging.getLogger(__name__)

# A sweep with nobody decoding beside it is advanced this long before the loop looks around.
LONGEST_TURN = 0.05  # seconds
SMOOTHING = 0.1  # weight of the newest decode step in the running mean
BESIDE_SMOOTHING = 0.3  # the same beside a sweep, where the next sweep piece depends on it


class Engine:
    """Everything that serves requests, without processes and without text."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        cache: ExpertCache,
        kv: KVManager,
        *,
        info: EngineInfo,
        closing: Sequence[Callable[[], None]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._executor = executor
        self._cache = cache
        self._kv = kv
        self._closing = closing
        self._clock = clock
        self._started = clock()
        self._step_seconds = 0.0
        self._beside_seconds = 0.0  # of a step beside a sweep
        self._step_rows = 0  # in the last step that was measured
        self._waited: dict[int, float] = {}  # exposed seconds of a sweep's earlier turns
        self._step_tokens: deque[int] = deque(maxlen=4096)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is left to forget."""
        return self._scheduler.idle

    def add(self, request: Request) -> None:
        """Take a request that passed `scheduler.limits.check`."""
        self._scheduler.add(request, self._clock())
        self._executor.add(request)

    def abort(self, id: str) -> None:
        """End a sequence without an event; harmless when it is not known."""
        self._scheduler.abort(id)

    def step(self, wake: Callable[[], bool] = lambda: False) -> list[TokenEvent]:
        """One turn. A sweep pauses early when `wake()` says that somebody wants attention."""
        plan = self._scheduler.schedule(self._clock(), self._step_seconds, self._beside_seconds)
        if plan is None:
            return []
        for number, id in plan.dropped:
            if self._executor.drop(number, id):
                self._waited.pop(number, None)
        for id in plan.released:
            self._executor.forget(id)
        events: list[TokenEvent] = []
        if plan.opened is not None:
            events += self._open(plan.opened)
        if plan.decode is not None:
            events += self._decode(plan.decode)
        if plan.advance is not None:
            events += self._advance(plan.advance, plan.budget, wake)
        return events

    def _open(self, plan: SweepPlan) -> list[TokenEvent]:
        try:
            self._executor.open(plan)
        except Exception as error:
            log.exception("a sweep could not be opened")
            return self._fail([row.id for row in plan.rows], error)
        return []

    def _decode(self, plan: DecodePlan) -> list[TokenEvent]:
        started, exposed = self._clock(), self._executor.exposed
        try:
            sampled = self._executor.decode(plan)
        except Exception as error:
            log.exception("a decode step failed")
            return self._fail([row.id for row in plan.rows], error)
        now = self._clock()
        self._measure(now - started, len(plan.rows))
        self._step_tokens.append(len(plan.rows))
        return self._scheduler.update_decode(plan, sampled, now, self._executor.exposed - exposed)

    def _measure(self, took: float, rows: int) -> None:
        """Keep the mean of an undisturbed step, and apart from it that of one beside a sweep:
        sweeps are budgeted by the first, so that mixing them would lengthen both in turn."""
        if self._executor.sweeping:
            beside = self._beside_seconds or took
            self._beside_seconds = beside + BESIDE_SMOOTHING * (took - beside)
            if rows <= 2 * self._step_rows:
                return
        else:
            self._beside_seconds = 0.0
        mean = self._step_seconds or took
        self._step_seconds = mean + SMOOTHING * (min(took, 10 * mean) - mean)
        self._step_rows = rows

    def _advance(
        self, number: int, budget: float | None, wake: Callable[[], bool]
    ) -> list[TokenEvent]:
        exposed = self._executor.exposed
        clock, limit = self._clock, LONGEST_TURN if budget is None else budget
        deadline = clock() + limit
        try:
            sampled = self._executor.advance(number, lambda: clock() >= deadline or wake())
        except Exception as error:
            log.exception("a sweep failed")
            self._waited.pop(number, None)
            return self._fail(list(self._executor.close(number)), error)
        waited = self._executor.exposed - exposed + self._waited.pop(number, 0.0)
        if sampled is None:
            self._waited[number] = waited
            return []
        self._step_tokens.append(len(sampled))
        return self._scheduler.update_sweep(number, sampled, clock(), waited)

    def _fail(self, ids: list[str], error: Exception) -> list[TokenEvent]:
        message = f"the step failed: {type(error).__name__}"
        return self._scheduler.fail(ids, message, self._clock())

    def stats(self) -> EngineStats:
        """A snapshot. `step_tokens` holds the steps since the last one."""
        tokens = list(self._step_tokens)
        self._step_tokens.clear()
        return EngineStats(
            scheduler=self._scheduler.stats(),
            kv=self._kv.stats(),
            experts=self._cache.stats(),
            step_seconds=self._step_seconds,
            step_tokens=tokens,
            uptime=self._clock() - self._started,
        )

    def check(self) -> None:
        """Raise AssertionError when any bookkeeping contradicts itself or a lease is open."""
        self._scheduler.check()
        self._cache.check()

    def close(self) -> None:
        """Stop the workers, close files, keep what the policy learned."""
        self._cache.close()
        for close in self._closing:
            close()
