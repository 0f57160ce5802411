"""A call while it runs. Owns: its engine stream (as a lease), its choices' texts and its accounts.

Does not own: the wire format. Streamed and whole replies are both made from the pieces it yields.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType

from moestro.errors import GrammarError, MoestroError, StepFailed
from moestro.server.call import Call
from moestro.server.choice import ChoiceText, Piece
from moestro.server.engine_port import Engine, Stream
from moestro.server.prometheus import Finished, Metrics
from moestro.server.reasoning_count import ReasoningCounter
from moestro.server.tokenizer import Tokenizer
from moestro.types import GRAMMAR_FAULT, Finish, Timing, TokenEvent, TokenLogprobs

PromptLogprobs = tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call so far. `reasoning` is a part of `completion`."""

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0


@dataclass(slots=True)
class _Clock:
    """When one choice's tokens came, on the monotonic clock."""

    first: float = 0.0
    last: float = 0.0
    timing: Timing | None = None
    reported: bool = False


class Generation:
    """Opens a call's sequences; leaving the context ends whatever still runs.

    `opened` by `open`, entered and left by whoever makes the reply; nothing may come between.
    """

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        metrics: Metrics,
        observer: Callable[[int, Finished], None] | None = None,
    ) -> None:
        """`observer` hears of each choice's end, by its index."""
        self.call = call
        self._observer = observer
        self.tokenizer = tokenizer
        self.choices = [self._choice() for _ in call.requests]
        self._reasoning = [self._counter() for _ in call.requests]
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}  # by prompt: choices share them
        self._index = {request.id: i for i, request in enumerate(call.requests)}
        self._clocks = [_Clock() for _ in call.requests]
        self._cached = [0] * len(call.prompts)
        self._running = len(call.requests)
        self._metrics = metrics
        self._stream: Stream | None = None

    def _choice(self) -> ChoiceText:
        output = self.call.output
        detokenizer = self.tokenizer.detokenizer(
            skip_special=output.skip_special,
            continuing=output.continuing,
            keep=output.format.keep if output.format is not None else frozenset(),
        )
        return ChoiceText(detokenizer, output.stops, detailed=output.detailed)

    def _counter(self) -> ReasoningCounter | None:
        form = self.call.output.format
        return form.counter(self.tokenizer.bytes_of) if form is not None else None

    def open(self, engine: Engine) -> None:
        """Hand the sequences to the engine. Raises what admission raises, with nothing held."""
        try:
            self._stream = engine.open(self.call.requests)
        except MoestroError as error:
            self._metrics.rejected(error.code)
            raise
        self._metrics.called(self.call.n)

    async def __aenter__(self) -> Generation:
        assert self._stream is not None, "open() comes first"
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._stream is not None
        await self._stream.__aexit__(kind, error, trace)
        for index in range(len(self.choices)):
            self._report(index, Finish.ABORT)

    @property
    def done(self) -> bool:
        """True when every choice has its end."""
        return self._running == 0

    def usage(self) -> Usage:
        """Return the counts so far."""
        completion = sum(choice.completion_tokens for choice in self.choices)
        reasoning = sum(counter.count for counter in self._reasoning if counter is not None)
        return Usage(self.call.prompt_tokens, completion, sum(self._cached), reasoning)

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yield what can be sent, by ascending choice; at most one piece per choice each time.

        Raises `MoestroError` when a sequence fails or the engine is gone.
        """
        assert self._stream is not None
        batches = self._stream.batches()
        try:
            async for batch in batches:
                yield self._feed(batch)
                if self.done:
                    break
        except MoestroError:
            for index in range(len(self.choices)):
                self._report(index, Finish.ERROR)
            raise
        if not self.done:
            raise StepFailed("The engine ended the request before it was finished.")

    def _feed(self, batch: list[TokenEvent]) -> list[tuple[int, Piece]]:
        self._metrics.look()
        now = time.monotonic()
        touched: dict[int, int] = {}  # choice -> tokens in this batch
        for event in batch:
            index = self._index[event.id]
            if self.choices[index].finish is not None:
                continue  # said before the engine heard that a stop string had ended it
            touched[index] = touched.get(index, 0) + len(event.token_ids)
            self._push(index, event)
        indices = sorted(touched) if len(touched) > 1 else touched
        return [(index, self._take(index, touched[index], now)) for index in indices]

    def _take(self, index: int, tokens: int, now: float) -> Piece:
        if tokens:
            self._clock(index, tokens, now)
        piece = self.choices[index].take()
        if piece.finish is not None:
            self._running -= 1
            self._report(index, piece.finish)
        return piece

    def _push(self, index: int, event: TokenEvent) -> None:
        if event.finish is Finish.ERROR or event.finish is Finish.ABORT:
            raise _failure(event.error, self.call.output.bound_by)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs[index // self.call.n] = event.prompt_logprobs
        if event.timing is not None:
            self._clocks[index].timing = event.timing
            if index % self.call.n == 0:
                self._cached[index // self.call.n] = event.timing.cached_tokens
        choice, counter = self.choices[index], self._reasoning[index]
        if self.call.output.discard:
            choice.finish = Finish.LENGTH if event.finish is not None else None
            return
        before = choice.completion_tokens
        if choice.push(event):
            assert self._stream is not None
            self._stream.abort(event.id)
        if counter is not None:  # not what came behind a stop string
            counter.push(event.token_ids[: choice.completion_tokens - before])

    def _clock(self, index: int, tokens: int, now: float) -> None:
        clock = self._clocks[index]
        if not clock.first:
            clock.first = now
            self._metrics.first_token(now - self.call.arrived)
        else:
            self._metrics.inter_token((now - clock.last) / tokens, tokens)
        clock.last = now

    def _report(self, index: int, unfinished: Finish) -> None:
        """Record one choice's end, once. `unfinished` is what it counts as when it has none."""
        clock = self._clocks[index]
        if clock.reported:
            return
        clock.reported = True
        choice, request = self.choices[index], self.call.requests[index]
        finished = Finished(
            finish=choice.finish or unfinished,
            prompt_tokens=len(request.prompt),
            completion_tokens=choice.completion_tokens,
            max_tokens=request.sampling.max_tokens,
            total=time.monotonic() - self.call.arrived,
            first_to_last=clock.last - clock.first,
            timing=clock.timing,
        )
        self._metrics.finished(finished)
        if self._observer is not None:
            self._observer(index, finished)


def _failure(error: str | None, bound_by: str | None) -> MoestroError:
    """Return what an engine's error is to the client. `bound_by`: where its grammar comes from."""
    error = error or "The engine ended the request."
    if not error.startswith(GRAMMAR_FAULT):
        return StepFailed(error)
    what = f"'{bound_by}' cannot be followed further" if bound_by else "The grammar cannot go on"
    return GrammarError(f"{what}: {error.removeprefix(GRAMMAR_FAULT)}.", param=bound_by)
