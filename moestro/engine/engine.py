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
from dataclasses import dataclass
from typing import Protocol

from moestro.engine.grammars import Grammars
from moestro.engine.messages import EngineInfo, Tuning
from moestro.expert_cache.policy import Policy
from moestro.grammar.matcher import Matcher
from moestro.kv_cache.manager import KVManager
from moestro.scheduler.plan import DecodePlan, Sampled, SweepPlan
from moestro.scheduler.scheduler import Scheduler
from moestro.stats import EngineStats, ExpertStats
from moestro.types import Request, TokenEvent

log = logging.getLogger(__name__)

# A sweep with nobody decoding beside it is advanced this long before the loop looks around.
LONGEST_TURN = 0.05  # seconds
SMOOTHING = 0.1  # weight of the newest decode step in the running mean
BESIDE_SMOOTHING = 0.3  # the same beside a sweep, where the next sweep piece depends on it


class Executor(Protocol):
    """What carries out plans: `engine.executor` on a CPU, `engine.gpu.executor` on a GPU."""

    @property
    def exposed(self) -> float:
        """Seconds that compute stood still for experts, since start."""

    @property
    def sweeping(self) -> bool:
        """A sweep is open."""

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Get ready for a new sequence; `matcher` when it has a grammar."""

    def forget(self, id: str) -> None:
        """The sequence is gone."""

    def runs_ahead(self, plan: DecodePlan) -> bool:
        """Whether this step may be launched before the one before it has been collected."""

    def launch(self, plan: DecodePlan) -> None:
        """Start a decode step."""

    def collect(self) -> list[Sampled]:
        """Wait for the oldest launched step: one token for every row of its plan."""

    def open(self, plan: SweepPlan) -> None:
        """Begin a sweep."""

    def drop(self, number: int, id: str) -> bool:
        """A sequence left a sweep; True when the sweep is over with that."""

    def advance(self, number: int, enough: Callable[[], bool]) -> list[Sampled] | None:
        """Advance a sweep until it is done (its results) or `enough()` (None)."""

    def close(self, number: int) -> tuple[str, ...]:
        """Give a sweep up; returns the sequences that were in it."""


class Cache(Protocol):
    """What the engine asks of an expert cache."""

    def change_policy(self, policy: Policy) -> None:
        """Go on under another policy; what is in memory stays there."""

    def stats(self) -> ExpertStats:
        """A snapshot of the counters."""

    @property
    def filling(self) -> bool:
        """Whether experts are still coming to empty slots and host memory."""

    def fill(self, *, beside_work: bool) -> None:
        """Go on with that, for a bounded time. No step may be under way."""

    def finish_fill(self, progress: Callable[[int, int], None]) -> None:
        """Wait until it is over."""

    def check(self) -> None:
        """Raise AssertionError unless all tables agree and nothing is open."""

    def close(self) -> None:
        """End the threads."""


class Policies(Protocol):
    """Where policies come from."""

    @property
    def policy(self) -> Policy:
        """The one in use."""

    def make(self, name: str) -> Policy:
        """One that could be used. Raises ConfigError."""

    def save(self) -> None:
        """Keep what the one in use has learned. Raises OSError."""

    def use(self, policy: Policy) -> None:
        """This one is in use from now on."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A decode step that was started, and when."""

    plan: DecodePlan
    at: float


class Engine:
    """Everything that serves requests, without processes and without text."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        cache: Cache,
        kv: KVManager,
        *,
        info: EngineInfo,
        policies: Policies,
        grammars: Grammars,
        closing: Sequence[Callable[[], None]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._executor = executor
        self._cache = cache
        self._kv = kv
        self._policies = policies
        self._grammars = grammars
        self._resting = False  # nothing could be done in the last turn
        self._closing = closing
        self._clock = clock
        self._started = clock()
        self._step_seconds = 0.0
        self._beside_seconds = 0.0  # of a step beside a sweep
        self._step_rows = 0  # in the last step that was measured
        self._ahead = False  # the last step may be under way while the next one is launched
        self._flying: deque[Launched] = deque()  # steps to be collected
        self._collected = clock()  # when the last one was
        self._exposed = 0.0  # of the executor, when last looked at
        self._waited: dict[int, float] = {}  # exposed seconds of a sweep's earlier turns
        self._step_tokens: deque[int] = deque(maxlen=4096)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is left to forget."""
        return self._scheduler.idle

    def add(self, request: Request) -> None:
        """Take a request that passed `scheduler.limits.check`."""
        held = request.sampling.grammar is not None
        self._scheduler.add(request, self._clock(), held=held)
        if held:
            self._grammars.start(request)
        else:
            self._executor.add(request)

    def abort(self, id: str) -> None:
        """End a sequence without an event; harmless when it is not known."""
        self._scheduler.abort(id)
        self._grammars.forget(id)

    def step(
        self,
        wake: Callable[[], bool] = lambda: False,
        hand_out: Callable[[list[TokenEvent]], None] | None = None,
    ) -> list[TokenEvent]:
        """One turn. A sweep pauses early when `wake()` says that somebody wants attention, and
        `hand_out` gets what is known before it begins; without one that is returned with the rest.
        Between two turns, unless a step is under way, a part of the experts that fill the memory
        comes."""
        events = self._turn(wake, hand_out)
        if self._cache.filling and not self._flying:
            self._cache.fill(beside_work=not self.idle)
        return events

    @property
    def compiling(self) -> bool:
        """Whether there is nothing to do until a grammar is compiled."""
        return self._resting and self._grammars.pending > 0

    @property
    def filling(self) -> bool:
        """Whether experts are still coming to empty memory: an idle engine has turns to do then."""
        return self._cache.filling

    def finish_fill(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Wait until memory is full, on an idle engine. `progress(resident, total)`: experts."""
        assert not self._flying, "a step is under way"
        self._cache.finish_fill(progress)

    def _turn(
        self,
        wake: Callable[[], bool],
        hand_out: Callable[[list[TokenEvent]], None] | None,
    ) -> list[TokenEvent]:
        events = self._admit()
        plan = self._scheduler.schedule(self._clock(), self._step_seconds, self._beside_seconds)
        self._resting = plan is None and not self._flying
        if plan is None:
            return events + self._collect(0)
        for number, id in plan.dropped:
            if self._executor.drop(number, id):
                self._waited.pop(number, None)
        for id in plan.released:
            self._executor.forget(id)
        if plan.opened is not None:
            events += self._open(plan.opened)
        if plan.advance is not None:
            events += self._collect(0)  # a sweep needs to know what is where
            if events and hand_out is not None:
                hand_out(events)
                events = []
            events += self._advance(plan.advance, plan.budget, wake)
        if plan.decode is not None:
            events += self._launch(plan.decode)
        ahead = plan.decode is not None and plan.advance is None
        return events + self._collect(1 if ahead and self._ahead else 0)

    def _admit(self) -> list[TokenEvent]:
        """Let those start whose grammar is compiled; those with one that cannot be end."""
        events: list[TokenEvent] = []
        for request, outcome in self._grammars.done():
            if isinstance(outcome, str):
                events += self._scheduler.fail([request.id], outcome, self._clock())
            else:
                self._executor.add(request, outcome)
                self._scheduler.ready(request.id)
        return events

    def _open(self, plan: SweepPlan) -> list[TokenEvent]:
        try:
            self._executor.open(plan)
        except Exception as error:
            log.exception("a sweep could not be opened")
            return self._fail([row.id for row in plan.rows], error)
        return []

    def _launch(self, plan: DecodePlan) -> list[TokenEvent]:
        self._ahead = self._executor.runs_ahead(plan)
        events = [] if self._ahead else self._collect(0)
        launched = Launched(plan, self._clock())
        try:
            self._executor.launch(plan)
        except Exception as error:
            log.exception("a decode step failed")
            return events + self._fail([row.id for row in plan.rows], error)
        self._flying.append(launched)
        return events

    def _collect(self, left: int) -> list[TokenEvent]:
        """Record launched steps, oldest first, until `left` are under way."""
        events: list[TokenEvent] = []
        while len(self._flying) > left:
            launched = self._flying.popleft()
            plan = launched.plan
            try:
                sampled = self._executor.collect()
            except Exception as error:
                log.exception("a decode step failed")
                events += self._fail([row.id for row in plan.rows], error)
                continue
            now = self._clock()
            self._measure(now - max(launched.at, self._collected), len(plan.rows))
            self._collected = now
            self._step_tokens.append(len(plan.rows))
            events += self._scheduler.update_decode(plan, sampled, now, self._newly_exposed())
        return events

    def _newly_exposed(self) -> float:
        """Seconds that compute stood still for experts, since this was asked last."""
        before, self._exposed = self._exposed, self._executor.exposed
        return self._exposed - before

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
        clock, limit = self._clock, LONGEST_TURN if budget is None else budget
        deadline = clock() + limit
        try:
            sampled = self._executor.advance(number, lambda: clock() >= deadline or wake())
        except Exception as error:
            log.exception("a sweep failed")
            self._waited.pop(number, None)
            return self._fail(list(self._executor.close(number)), error)
        waited = self._newly_exposed() + self._waited.pop(number, 0.0)
        if sampled is None:
            self._waited[number] = waited
            return []
        self._step_tokens.append(len(sampled))
        return self._scheduler.update_sweep(number, sampled, clock(), waited)

    def _fail(self, ids: list[str], error: Exception) -> list[TokenEvent]:
        message = f"the step failed: {type(error).__name__}"
        return self._scheduler.fail(ids, message, self._clock())

    def tune(self, tuning: Tuning) -> None:
        """Change what can change, between two turns; nobody's work is lost.

        Raises ConfigError and OSError, and then nothing has changed.
        """
        policy = self._policies.policy
        if tuning.expert_policy != policy.name:
            policy = self._policies.make(tuning.expert_policy)
            self._policies.save()
        self._scheduler.tune(tuning.max_num_seqs)
        if policy is not self._policies.policy:
            self._cache.change_policy(policy)
            self._policies.use(policy)

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
        assert not (self.idle and self._grammars.pending), "a grammar is compiled for nobody"

    def close(self) -> None:
        """Stop the workers, close files, keep what the policy learned."""
        self._cache.close()
        for close in self._closing:
            close()
