"""One batch driven through an engine in this process, with a clock beside it.

Owns: which times and counters are taken when. Prefill ends when the last sequence has its first
token; what follows is decode. Does not own: how often, or what the numbers mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

from moestro.engine.bench_figures import Floor, Load, Phase, Run, counts_between
from moestro.engine.engine import Engine
from moestro.engine.synthetic import FROZEN
from moestro.errors import StepFailed
from moestro.stats import EngineStats
from moestro.types import Request, SamplingParams

Clock = Callable[[], float]

FIRST_ID = 3  # prompts hold ordinary tokens
WINDOW = 4  # decode steps between two looks at the counters when the floor is measured
WINDOWS = 12


def requests(load: Load, name: str, vocab: int, output_len: int) -> list[Request]:
    """Greedy requests with random prompts that no other `name` shares."""
    draw = random.Random(f"{load.seed} {name}")
    low = min(FIRST_ID, vocab - 1)
    params = SamplingParams(max_tokens=output_len, temperature=0.0)
    return [
        Request(
            f"{name}-{row}",
            tuple(draw.randrange(low, vocab) for _ in range(load.input_len)),
            params,
        )
        for row in range(load.batch)
    ]


class Batch:
    """Runs requests that arrive together; knows when each token came."""

    def __init__(self, engine: Engine, wanted: Sequence[Request], clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._last = dict.fromkeys((request.id for request in wanted), 0.0)
        self._live = {request.id for request in wanted}
        self._silent = set(self._live)
        self.tokens = 0
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.now = self._began = clock()
        for request in wanted:
            engine.add(request)

    @property
    def started(self) -> bool:
        """Every sequence has its first token."""
        return not self._silent

    @property
    def ended(self) -> bool:
        """No sequence is left."""
        return not self._live

    def turn(self) -> None:
        """One turn of the engine. Raises StepFailed when a sequence ended with an error."""
        events = self._engine.step()
        self.now = self._clock()
        for event in events:
            if event.error is not None:
                raise StepFailed(f"a sequence of the benchmark ended early: {event.error}")
            for _ in event.token_ids:
                self._token(event.id)
            if event.finish is not None:
                self._live.discard(event.id)
        assert events or self.ended or not self._engine.idle, "the engine forgot a sequence"

    def pause(self) -> EngineStats:
        """A snapshot that no gap contains."""
        found = self._engine.stats()
        self.now = self._clock()
        self._last = dict.fromkeys(self._last, self.now)
        return found

    def settle(self) -> EngineStats:
        """Let the engine forget what ended; returns the last snapshot."""
        while not self._engine.idle:
            self._engine.step()
        return self._engine.stats()

    def _token(self, id: str) -> None:
        self.tokens += 1
        if id in self._silent:
            self._silent.discard(id)
            self.first.append(self.now - self._began)
        else:
            self.gaps.append(self.now - self._last[id])
        self._last[id] = self.now


def drive(engine: Engine, load: Load, name: str, clock: Clock) -> Run:
    """Run one batch of this load to its end."""
    before = engine.stats()
    wanted = requests(load, name, engine.info.vocab_size, load.output_len)
    began = clock()
    batch = Batch(engine, wanted, clock)
    while not batch.started:
        batch.turn()
    filled, early = batch.now, batch.tokens
    middle = batch.pause()
    resumed = batch.now
    while not batch.ended:
        batch.turn()
    ended = batch.now
    after = batch.settle()
    swept = middle.scheduler.swept_tokens - before.scheduler.swept_tokens
    sweeps = middle.scheduler.sweeps - before.scheduler.sweeps
    steps = after.scheduler.decode_steps - middle.scheduler.decode_steps
    return Run(
        prefill=Phase(filled - began, swept, sweeps, counts_between(before, middle)),
        decode=Phase(ended - resumed, batch.tokens - early, steps, counts_between(middle, after)),
        first=tuple(batch.first),
        gaps=tuple(batch.gaps),
    )


def measured_floor(engine: Engine, load: Load, clock: Clock) -> Floor | None:
    """The median of decode steps without misses, from a batch that does not count.

    Its rows repeat their experts where routing is made up. None when no window of steps was free
    of misses.
    """
    info = engine.info
    room = min(info.max_model_len, info.kv_tokens // load.batch - info.block_size) - load.input_len
    output = min(room, 2 + WINDOW * WINDOWS)
    if output < 2 + WINDOW:
        return None
    wanted = requests(load, f"{FROZEN}{load.batch}", info.vocab_size, output)
    batch = Batch(engine, wanted, clock)
    while not batch.started:
        batch.turn()
    free: list[float] = []
    before = batch.pause()
    while not batch.ended:
        began, goal = batch.now, before.scheduler.decode_steps + WINDOW
        tokens = batch.tokens + WINDOW * load.batch
        while not batch.ended and batch.tokens < tokens:
            batch.turn()
        took = batch.now - began
        after = batch.pause()
        whole = after.scheduler.decode_steps == goal
        if whole and after.experts.misses == before.experts.misses:
            free.append(took / WINDOW)
        before = after
    batch.settle()
    return Floor(median(free), True, WINDOW * len(free)) if free else None
