"""The scheduler: what runs in the next turn, and what its result means for each sequence.

Owns: the life of every sequence from arrival to its last event. Does not own: tensors, time
(callers pass `now`, in seconds), blocks (`kv_cache`) or the choice of a sweep (`filling`).

A turn is decide (`schedule`), do (the engine's executor), record (`update_decode` and
`update_sweep`, or `fail`). `abort` may come at any point between. A decode step may be decided
before the one before it is recorded: then its rows continue from tokens that nobody has seen,
and a row whose sequence turns out to have ended is passed over when it is recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Rows

from moestro.errors import ConfigError, InvalidRequest
from moestro.kv_cache.manager import KVManager
from moestro.kv_cache.prefix import Chain
from moestro.scheduler.filling import Filling
from moestro.scheduler.limits import Limits, check
from moestro.scheduler.pace import GAP_STEPS, sweep_budget
from moestro.scheduler.plan import DecodePlan, DecodeRow, Sampled, StepPlan, SweepPlan, SweepRow
from moestro.scheduler.queue import Line, Waiting
from moestro.scheduler.sequence import Sequence, Status
from moestro.scheduler.sweeps import Run, Sweeps
from moestro.stats import SchedulerStats
from moestro.types import Finish, Request, TokenEvent

NO_LIMIT = 2**31  # sequences


class Scheduler:
    """Decides for sequences under `limits` whose keys and values live in `kv`."""

    def __init__(self, limits: Limits, kv: KVManager, gap_steps: float = GAP_STEPS) -> None:
        assert limits.kv_tokens <= kv.capacity, (limits.kv_tokens, kv.capacity)
        self._limits = limits
        self._planned = limits.max_num_seqs  # what there is memory for
        self._kv = kv
        self._gap_steps = gap_steps
        self._filling = Filling(limits, kv)
        self._sweeps = Sweeps()
        self._live: dict[str, Sequence] = {}
        self._background = 0  # of these, those that nobody waits for
        self._waiting = Waiting(self._filling.small)
        self._running = Line()  # those that hold blocks
        self._arrivals = 0
        self._steps = 0  # decode steps decided
        self._released: list[str] = []
        self._dropped: list[tuple[int, str]] = []
        self._stats = SchedulerStats(finished={finish.value: 0 for finish in Finish})

    @property
    def idle(self) -> bool:
        """True when no sequence lives and the executor has heard of every end."""
        return not self._live and not self._released and not self._dropped

    def add(self, request: Request, now: float, *, held: bool = False) -> None:
        """Take a request, or raise ContextTooLong, InvalidRequest or QueueFull. When it is `held`
        it has its place in the queue, but starts only after `ready`."""
        foreground = len(self._live) - self._background
        check(request, self._limits, foreground - self._limits.max_num_seqs)
        if request.id in self._live:
            raise InvalidRequest("A request with this id is being served already.")
        if request.id in self._released:
            self._released.remove(request.id)  # or the executor would forget the newcomer
        self._arrivals += 1
        tokens = [*request.prompt, *request.generated]
        seq = Sequence(request, self._arrivals, now, self._chain(request, tokens), tokens)
        seq.held = held
        self._live[request.id] = seq
        self._background += request.background
        self._waiting.add(seq)

    def ready(self, id: str) -> None:
        """A sequence that was held may start. Harmless for an id that is not known."""
        if id in self._live:
            self._live[id].held = False

    def tune(self, max_num_seqs: int) -> None:
        """Change how many run from now on; who runs already goes on. How many may wait is from
        here on up to whoever sends them: a limit that was lowered must not lose what lives.

        Raises ConfigError for more seats than were planned for.
        """
        if not 0 < max_num_seqs <= self._planned:
            raise ConfigError(
                f"max_num_seqs {max_num_seqs}: memory was planned for {self._planned} at most",
                param="max_num_seqs",
            )
        self._limits = dataclasses.replace(
            self._limits, max_num_seqs=max_num_seqs, max_num_queued=NO_LIMIT
        )
        self._filling.seats = max_num_seqs

    def abort(self, id: str) -> None:
        """Forget a sequence, in whatever state. Harmless for an id that is not known."""
        seq = self._live.get(id)
        if seq is not None:
            self._end(seq, Finish.ABORT)

    def fail(self, ids: Iterable[str], message: str, now: float) -> list[TokenEvent]:
        """A step raised: these sequences end with an error. Unknown ids are passed over."""
        known = [self._live[id] for id in dict.fromkeys(ids) if id in self._live]
        return [self._failed(seq, message, now) for seq in known]

    def schedule(
        self, now: float, step_seconds: float, beside_seconds: float = 0.0
    ) -> StepPlan | None:
        """The next turn, or None when there is nothing to do.

        `step_seconds` is how long a decode step takes nowadays, `beside_seconds` how long one
        that ran beside a sweep took.
        """
        rows = self._decode_rows()
        opened = self._open_sweep(now)
        advance = self._sweeps.turn()
        released, dropped = tuple(self._released), tuple(self._dropped)
        if not (rows or released or dropped) and advance is None:
            return None
        self._released.clear()
        self._dropped.clear()
        budget = sweep_budget(
            decoding=bool(rows),
            open_sweeps=len(self._sweeps),
            step_seconds=step_seconds,
            beside_seconds=beside_seconds,
            gap_steps=self._gap_steps,
        )
        return StepPlan(
            decode=self._launch(rows) if rows else None,
            opened=opened,
            advance=advance,
            budget=None if advance is None else budget,
            dropped=dropped,
            released=released,
        )

    def update_decode(
        self, plan: DecodePlan, sampled: Rows[Sampled], now: float, exposed: float
    ) -> list[TokenEvent]:
        """Record a decode step. Rows of sequences that ended since are passed over."""
        self._stats.decode_steps += 1
        events = []
        for result in sampled:
            seq = self._live.get(result.id)
            if seq is None or not seq.launched or seq.launched[0] != plan.number:
                continue
            seq.launched.popleft()
            seq.exposed += exposed
            events.append(self._record(seq, len(seq.tokens), result, now))
        return events

    def update_sweep(
        self, number: int, sampled: Rows[Sampled], now: float, exposed: float
    ) -> list[TokenEvent]:
        """Record a sweep that is at the top. Harmless for a number that is not open."""
        runs = self._sweeps.close(number)
        if not runs:
            return []
        self._stats.sweeps += 1
        results = {result.id: result for result in sampled}
        events = []
        for run in runs:
            run.seq.exposed += exposed
            self._stats.swept_tokens += len(run.row.tokens)
            event = self._record_run(run, results.get(run.row.id), now)
            if event is not None:
                events.append(event)
        return events

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        decoding = sum(seq.status is Status.DECODING for seq in self._running)
        return dataclasses.replace(
            self._stats,
            running=len(self._running),
            decoding=decoding,
            sweeping=len(self._running) - decoding,
            waiting=len(self._waiting),
            finished=dict(self._stats.finished),
        )

    def check(self) -> None:
        """Raise AssertionError unless lines, sweeps and blocks agree."""
        self._kv.check()
        self._sweeps.check()
        self._waiting.check()
        self._running.check()
        assert {seq.id for seq in self._running} == self._kv.holders(), "holders do not run"
        assert len(self._running) <= self._planned, len(self._running)
        members = [*self._waiting, *self._running]
        assert {id(seq) for seq in members} == {id(seq) for seq in self._live.values()}
        assert len(members) == len(self._live), "a sequence stands in two lines"
        assert self._background == sum(seq.request.background for seq in members)
        for seq in self._waiting:
            assert seq.status is Status.WAITING, (seq.id, seq.status)
            assert seq.sweep is None, (seq.id, seq.sweep)
            assert not seq.computed, (seq.id, seq.computed)
        for seq in self._running:
            assert not seq.held, seq.id
            left = 1 if seq.status is Status.DECODING else seq.remaining
            assert seq.remaining == left > 0, (seq.id, seq.status, seq.remaining)

    # Decide

    def _decode_rows(self) -> tuple[DecodeRow, ...]:
        rows = []
        for seq in list(self._running):  # whoever gives way comes after those with rows already
            if seq.status is not Status.DECODING or seq.ends_before(self._limits):
                continue
            if self._make_room(seq):
                token = None if seq.launched else seq.tokens[-1]
                blocks, outputs = self._kv.table(seq.id), seq.outputs + len(seq.launched)
                further = self._kv.further_tables(seq.id)
                rows.append(DecodeRow(seq.id, token, seq.ahead - 1, blocks, outputs, further))
        return tuple(rows)

    def _launch(self, rows: tuple[DecodeRow, ...]) -> DecodePlan:
        self._steps += 1
        for row in rows:
            self._live[row.id].launched.append(self._steps)
        return DecodePlan(rows, self._steps)

    def _make_room(self, seq: Sequence) -> bool:
        """Get the blocks for its next token; False when `seq` itself had to give way."""
        while not self._kv.grow(seq.id, seq.ahead):
            victim = self._running.last()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _open_sweep(self, now: float) -> SweepPlan | None:
        running, sweeps = self._running, self._sweeps
        paused = [seq for seq in running if seq.status is Status.SWEEPING and seq.sweep is None]
        if not paused and not self._waiting:
            return None
        runs = []
        for seq, share in self._filling.choose(paused, self._waiting, len(running), sweeps):
            if seq.status is Status.WAITING and not self._start(seq, now):
                break
            runs.append(self._run(seq, share))
        if not runs:
            return None
        tokens = sum(len(run.row.tokens) for run in runs)
        overtakes = not sweeps.is_free(small=False)
        whole = tokens <= self._filling.small and all(run.row.samples for run in runs)
        small = overtakes or (whole and sweeps.is_free(small=True))
        return sweeps.open(runs, small=small)

    def _run(self, seq: Sequence, share: int) -> Run:
        start, size = seq.computed, self._kv.block_size
        end = min(start + share, len(seq.tokens))
        row = SweepRow(
            id=seq.id,
            tokens=tuple(seq.tokens[start:end]),
            start=start,
            blocks=self._kv.table(seq.id),
            output_index=seq.outputs,
            samples=end == len(seq.tokens),
            further=self._kv.further_tables(seq.id),
        )
        return Run(seq, row, seq.chain.keys[start // size : end // size])

    # Move a sequence from one state to another

    def _chain(self, request: Request, tokens: list[int]) -> Chain:
        scores_prompt = request.sampling.prompt_logprobs is not None
        reuse = not scores_prompt or len(tokens) > len(request.prompt)
        return self._kv.chain(tuple(tokens), request.cache_salt, reuse=reuse)

    def _start(self, seq: Sequence, now: float) -> bool:
        cached = self._kv.start(seq.id, seq.chain)
        if cached is None:
            return False
        self._waiting.remove(seq)
        self._running.add(seq)
        seq.status, seq.computed, seq.awaits = Status.SWEEPING, cached, None
        if seq.started is None:
            seq.started = now
            seq.cached = min(cached, len(seq.request.prompt))
            self._stats.prompt_tokens += len(seq.request.prompt)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.status, seq.computed = Status.WAITING, 0
        seq.launched.clear()  # what these steps sample will be sampled again
        seq.chain = self._chain(seq.request, seq.tokens)
        seq.prompt_logprobs.clear()
        seq.preemptions += 1
        self._stats.preemptions += 1
        self._waiting.add(seq)

    def _leave(self, seq: Sequence) -> None:
        """Out of the running, its blocks free again."""
        number = self._sweeps.leave(seq)
        if number is not None:
            self._dropped.append((number, seq.id))
        self._running.remove(seq)
        self._kv.free(seq.id)

    def _end(self, seq: Sequence, finish: Finish) -> None:
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
        else:
            self._leave(seq)
        del self._live[seq.id]
        self._background -= seq.request.background
        self._released.append(seq.id)
        self._stats.finished[finish.value] += 1

    # Record

    def _record_run(self, run: Run, result: Sampled | None, now: float) -> TokenEvent | None:
        seq = run.seq
        if result is not None and seq.wants_prompt_logprobs and result.prompt_logprobs:
            seq.prompt_logprobs += result.prompt_logprobs
        if run.row.samples:
            if result is None:
                return self._failed(seq, "the step returned no token for this sequence", now)
            return self._record(seq, run.end, result, now)
        if result is not None and result.error is not None:
            return self._failed(seq, result.error, now)
        seq.computed = run.end
        self._kv.commit(seq.id, seq.tokens, run.end)
        return None

    def _record(self, seq: Sequence, computed: int, result: Sampled, now: float) -> TokenEvent:
        """The first `computed` tokens have their KV, and a token was sampled after them."""
        error = result.error or seq.fault_of(result.token, self._limits)
        if error is not None:
            return self._failed(seq, error, now)
        seq.computed, seq.status = computed, Status.DECODING
        self._kv.commit(seq.id, seq.tokens, computed)
        scored = tuple(seq.prompt_logprobs) if seq.wants_prompt_logprobs else None
        first = seq.first_token is None
        seq.first_token = now if seq.first_token is None else seq.first_token
        tokens = (result.token,) if seq.request.sampling.max_tokens else ()
        seq.tokens += tokens
        self._stats.generation_tokens += len(tokens)
        finish = Finish.STOP if result.complete else seq.finish(self._limits)
        if finish is not None:
            self._end(seq, finish)
        return TokenEvent(
            id=seq.id,
            token_ids=tokens,
            logprobs=(result.logprobs,) if tokens and result.logprobs is not None else (),
            prompt_logprobs=scored,
            finish=finish,
            stop_token=seq.stop_token() if finish is Finish.STOP else None,
            timing=seq.timing(now) if first or finish is not None else None,
        )

    def _failed(self, seq: Sequence, message: str, now: float) -> TokenEvent:
        self._end(seq, Finish.ERROR)
        timing = seq.timing(now)
        return TokenEvent(seq.id, finish=Finish.ERROR, error=message, timing=timing)
