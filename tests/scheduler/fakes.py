"""An executor without tensors, a clock that only the work moves, and a harness around both.

The "model" is a chain of hashes: the state at a position mixes the state before it, read from the
simulated KV memory, with the token there. The next token is a function of that state and of the
output index. So a lost, repeated or misplaced token, a block reused wrongly or written after its
release changes what comes out, or is seen when a row's memory is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from moestro.kv_cache.groups import LayerGroups, one_group
from moestro.kv_cache.manager import KVManager
from moestro.kv_cache.prefix import GONE
from moestro.kv_cache.spec import LayerMemory
from moestro.scheduler.limits import Limits
from moestro.scheduler.plan import DecodePlan, DecodeRow, Sampled, StepPlan, SweepPlan, SweepRow
from moestro.scheduler.queue import Waiting
from moestro.scheduler.scheduler import Scheduler
from moestro.types import Finish, Request, SamplingParams, TokenEvent, TokenLogprobs

VOCAB = 50
MASK = (1 << 61) - 1
EMPTY = 17
JUNK = -1


def mix(state: int, token: int) -> int:
    return (state * 1_000_003 + token * 7919 + 12345) & MASK


def state_of(tokens: tuple[int, ...]) -> int:
    state = EMPTY
    for token in tokens:
        state = mix(state, token)
    return state


def choose(state: int, index: int, sampling: SamplingParams) -> int:
    """The next token: any, but no end before min_tokens."""
    state = mix(state, index + 1)
    while True:
        token = (state >> 20) % VOCAB
        ends = token in sampling.eos_token_ids or token in sampling.stop_token_ids
        if not ends or index >= sampling.min_tokens:
            return token
        state = mix(state, 1)


def scores(tokens: tuple[int, ...]) -> tuple[TokenLogprobs | None, ...]:
    """What `prompt_logprobs` are in this model."""
    rest = range(1, len(tokens))
    return None, *(TokenLogprobs(tokens[i], -float(state_of(tokens[:i]))) for i in rest)


def solo(request: Request, limits: Limits) -> tuple[tuple[int, ...], Finish]:
    """The new tokens of `request` when it runs alone, from the definition."""
    tokens, sampling = [*request.prompt, *request.generated], request.sampling
    while True:
        outputs = len(tokens) - len(request.prompt)
        if outputs:
            last = tokens[-1]
            if last in sampling.eos_token_ids or last in sampling.stop_token_ids:
                finish = Finish.STOP
                break
        over = len(tokens) >= limits.max_model_len or len(tokens) > limits.kv_tokens
        if outputs >= sampling.max_tokens or (over and outputs > len(request.generated)):
            finish = Finish.LENGTH
            break
        tokens.append(choose(state_of(tuple(tokens)), outputs, sampling))
    return tuple(tokens[len(request.prompt) + len(request.generated) :]), finish


@dataclass
class Cost:
    """Seconds."""

    step: float = 0.010
    layer: float = 0.002
    layer_token: float = 0.0
    layers: int = 10


@dataclass
class Travelling:
    plan: SweepPlan
    rows: dict[str, SweepRow]
    layer: int = 0


@dataclass
class FakeExecutor:
    """Carries out plans and checks that each is one it can carry out."""

    block_size: int
    requests: dict[str, Request]
    known: dict[str, tuple[int, ...]]  # prompt and outputs of each sequence, by the harness
    cost: Cost = field(default_factory=Cost)
    now: float = 0.0
    memory: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    sweeps: dict[int, Travelling] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)  # ids it holds state for
    poisoned: set[str] = field(default_factory=set)
    unseen: dict[str, tuple[int, ...]] = field(default_factory=dict)  # sampled, not yet recorded
    interrupt: Callable[[float], bool] = lambda now: False  # did a message arrive until now?
    kinds: tuple[LayerMemory, ...] = one_group(1).kinds  # of each group of layers

    def places(self, row: DecodeRow | SweepRow, position: int) -> list[tuple[int, int]]:
        """Where each group of layers has the position."""
        number, offset = divmod(position, self.block_size)
        return [(table[number], offset) for table in (row.blocks, *row.further)]

    def write(self, row: DecodeRow | SweepRow, position: int, content: tuple[int, int]) -> None:
        for place in self.places(row, position):
            assert place[0] != GONE, f"{row.id} has no block at {position}"
            self.memory[place] = content

    def tokens(self, id: str) -> tuple[int, ...]:
        """What the device knows of a sequence."""
        return self.known[id] + self.unseen.get(id, ())

    def read(self, row: DecodeRow | SweepRow, length: int) -> int:
        """The state after `length` tokens of the row, each of which that is seen must be in
        memory."""
        state, tokens = EMPTY, self.tokens(row.id)
        for position in range(length):
            state = mix(state, tokens[position])
            for kind, place in zip(self.kinds, self.places(row, position), strict=True):
                if position >= kind.seen_from(length):
                    got = self.memory.get(place)
                    assert got == (state, tokens[position]), f"{row.id} at {position}: {got}"
        return state

    def forget(self, plan: StepPlan) -> None:
        for id in plan.released:
            self.kept.discard(id)
            for sweep in self.sweeps.values():
                sweep.rows.pop(id, None)
        for number, id in plan.dropped:
            if number in self.sweeps:
                self.sweeps[number].rows.pop(id, None)
        self.sweeps = {number: sweep for number, sweep in self.sweeps.items() if sweep.rows}

    def open(self, plan: SweepPlan) -> None:
        assert plan.number not in self.sweeps
        assert len(self.sweeps) < 2
        for row in plan.rows:
            assert row.tokens
            assert row.tokens == self.known[row.id][row.start : row.start + len(row.tokens)]
            assert row.samples == (row.start + len(row.tokens) == len(self.known[row.id]))
            self.read(row, row.start)
            self.kept.add(row.id)
        self.sweeps[plan.number] = Travelling(plan, {row.id: row for row in plan.rows})

    def decode(self, plan: DecodePlan) -> list[Sampled]:
        self.now += self.cost.step
        travelling = {id for sweep in self.sweeps.values() for id in sweep.rows}
        results = []
        for row in plan.rows:
            assert row.id in self.kept
            assert row.id not in travelling
            tokens = self.tokens(row.id)
            assert row.position == len(tokens) - 1
            assert row.token == (None if self.unseen.get(row.id) else tokens[-1])
            state = mix(self.read(row, row.position), tokens[-1])
            self.write(row, row.position, (state, tokens[-1]))
            results.append(self.sample(row, state))
        for result in results:
            self.unseen[result.id] = (*self.unseen.get(result.id, ()), result.token)
        return results

    def sample(self, row: DecodeRow | SweepRow, state: int) -> Sampled:
        if row.id in self.poisoned:
            return Sampled(row.id, 0, error="the logits are not finite")
        sampling = self.requests[row.id].sampling
        token = choose(state, row.output_index, sampling)
        wanted = sampling.logprobs is not None
        return Sampled(row.id, token, TokenLogprobs(token, float(-state)) if wanted else None)

    def advance(self, number: int, budget: float | None) -> list[Sampled] | None:
        """Some layers; the results when the sweep has reached the top."""
        sweep, began = self.sweeps[number], self.now
        for row in sweep.rows.values():  # lower layers are written before the sweep is done
            for position in range(row.start, row.start + len(row.tokens)):
                self.write(row, position, (JUNK, JUNK))
        tokens = sum(len(row.tokens) for row in sweep.rows.values())
        while sweep.layer < self.cost.layers:
            self.now += self.cost.layer + self.cost.layer_token * tokens
            sweep.layer += 1
            spent = self.now - began
            if self.interrupt(self.now) if budget is None else spent >= budget - 1e-9:
                break
        if sweep.layer < self.cost.layers:
            return None
        del self.sweeps[number]
        results = [self.finish(row) for row in sweep.rows.values()]
        return [result for result in results if result is not None]

    def finish(self, row: SweepRow) -> Sampled | None:
        state = self.read(row, row.start)
        for offset, token in enumerate(row.tokens):
            state = mix(state, token)
            self.write(row, row.start + offset, (state, token))
        end = row.start + len(row.tokens)
        asked = self.requests[row.id].sampling.prompt_logprobs is not None
        piece = scores(self.known[row.id][:end])[row.start :] if asked else None
        if row.id in self.poisoned:
            return Sampled(row.id, -1, error="the hidden states are not finite")
        if row.samples:
            return replace(self.sample(row, state), prompt_logprobs=piece)
        return Sampled(row.id, -1, prompt_logprobs=piece) if asked else None


class Harness:
    """A scheduler and its executor, turned by hand."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        blocks: int = 64,
        seqs: int = 8,
        queued: int = 100,
        window: int = 64,
        max_model_len: int = 10_000,
        prefix_caching: bool = True,
        small: int | None = None,
        cost: Cost | None = None,
        ahead: bool = False,
        groups: LayerGroups | None = None,
    ) -> None:
        caching = prefix_caching
        self.kv = KVManager(block_size, blocks, prefix_caching=caching, groups=groups, run=window)
        kv_tokens = min(self.kv.capacity, block_size * blocks)
        self.limits = Limits(max_model_len, seqs, queued, VOCAB, kv_tokens, window)
        self.scheduler = Scheduler(self.limits, self.kv)
        if small is not None:  # less than SMALL_TOKENS, to see long and small sweeps cheaply
            self.scheduler._filling.small = small
            self.scheduler._waiting = Waiting(small)
        self.requests: dict[str, Request] = {}
        self.held: set[str] = set()  # may not start
        self.known: dict[str, tuple[int, ...]] = {}
        self.executor = FakeExecutor(block_size, self.requests, self.known, cost or Cost())
        if groups is not None:
            self.executor.kinds = groups.kinds
        self.events: dict[str, list[TokenEvent]] = {}
        self.times: dict[str, list[float]] = {}
        self.arrived: dict[str, float] = {}
        self.plans: list[StepPlan] = []
        self.ahead = ahead  # a step is decided and run before the one before it is recorded
        self.launched: list[tuple[DecodePlan, list[Sampled]]] = []

    @property
    def now(self) -> float:
        return self.executor.now

    def add(
        self,
        id: str,
        prompt: tuple[int, ...] | int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str | None = None,
        generated: tuple[int, ...] = (),
        held: bool = False,
        **sampling: object,
    ) -> Request:
        """Add a request. A number stands for a prompt of that length unlike any other."""
        if isinstance(prompt, int):
            seed = state_of(tuple(map(ord, id)))
            prompt = tuple((mix(seed, i) >> 9) % VOCAB for i in range(prompt))
        request = Request(
            id, prompt, SamplingParams(max_tokens, **sampling), priority, salt, generated
        )
        self.add_request(request, held=held)
        return request

    def add_request(self, request: Request, *, held: bool = False) -> None:
        """Add a request as it is."""
        self.scheduler.add(request, self.now, held=held)
        id = request.id
        (self.held.add if held else self.held.discard)(id)
        self.requests[id] = request
        self.known[id] = (*request.prompt, *request.generated)
        self.events[id], self.times[id] = [], []
        self.arrived[id] = self.now

    def ready(self, id: str) -> None:
        """Let a held one start."""
        self.held.discard(id)
        self.scheduler.ready(id)

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert not self.finished(event.id), event.id
            self.known[event.id] += event.token_ids
            self.events[event.id].append(event)
            self.times[event.id].append(self.now)

    def turn(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now, self.executor.cost.step)
        if plan is None:
            if not self.launched:
                return None
            self.collect(0)
            return StepPlan()
        self.plans.append(plan)
        self.executor.forget(plan)
        if plan.opened is not None:
            assert not self.held & {row.id for row in plan.opened.rows}
            self.executor.open(plan.opened)
        if plan.decode is not None:
            self.launched.append((plan.decode, self.executor.decode(plan.decode)))
        self.collect(1 if self.ahead and plan.decode is not None and plan.advance is None else 0)
        if plan.advance is not None and plan.advance in self.executor.sweeps:
            done = self.executor.advance(plan.advance, plan.budget)
            if done is not None:
                self.take(self.scheduler.update_sweep(plan.advance, done, self.now, 0.002))
        self.scheduler.check()
        return plan

    def collect(self, left: int) -> None:
        """Record launched steps, oldest first, until `left` are unrecorded."""
        while len(self.launched) > left:
            plan, results = self.launched.pop(0)
            self.take(self.scheduler.update_decode(plan, results, self.now, 0.001))
            self.executor.unseen.clear()
            for _, later in self.launched:
                for result in later:
                    self.executor.unseen[result.id] = (result.token,)

    def run(self, turns: int = 5000) -> None:
        """Turn until there is nothing to do."""
        for _ in range(turns):
            if self.turn() is None:
                assert self.scheduler.idle
                assert self.kv.stats().blocks_used == 0
                assert not self.executor.sweeps
                assert not self.executor.kept
                return
        raise AssertionError(f"not done after {turns} turns")

    def finished(self, id: str) -> bool:
        return any(event.finish is not None for event in self.events[id])

    def tokens(self, id: str) -> tuple[int, ...]:
        return tuple(token for event in self.events[id] for token in event.token_ids)

    def opened(self) -> list[SweepPlan]:
        return [plan.opened for plan in self.plans if plan.opened is not None]

    def check_finished(self, id: str) -> None:
        """`id` ended with exactly what a solo run gives, and every event is as it should be."""
        request, events = self.requests[id], self.events[id]
        expected, finish = solo(request, self.limits)
        assert self.tokens(id) == expected, id
        assert [event.finish for event in events] == [None] * (len(events) - 1) + [finish]
        sampling, last = request.sampling, events[-1]
        stopped = finish is Finish.STOP and expected[-1] not in sampling.eos_token_ids
        assert last.stop_token == (expected[-1] if stopped else None)
        assert [event.timing is not None for event in events] == [
            place in (0, len(events) - 1) for place in range(len(events))
        ]
        self.check_logprobs(id)
        timing = last.timing
        assert timing is not None
        assert min(timing.queued, timing.prefill, timing.decode) >= 0
        total = timing.queued + timing.prefill + timing.decode
        assert abs(total - (self.times[id][-1] - self.arrived[id])) < 1e-6

    def check_logprobs(self, id: str) -> None:
        request, events = self.requests[id], self.events[id]
        tokens = (*request.prompt, *request.generated, *self.tokens(id))
        position = len(request.prompt) + len(request.generated)
        for event in events:
            asked = request.sampling.logprobs is not None and event.token_ids
            assert len(event.logprobs) == (1 if asked else 0)
            for value in event.logprobs:
                assert value == TokenLogprobs(tokens[position], float(-state_of(tokens[:position])))
            position += len(event.token_ids)
        asked = request.sampling.prompt_logprobs is not None and not request.generated
        assert events[0].prompt_logprobs == (scores(request.prompt) if asked else None)
        assert all(event.prompt_logprobs is None for event in events[1:])
