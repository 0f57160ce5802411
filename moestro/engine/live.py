"""A request while the server waits for its end: what was asked, and what has come so far.

Owns: what an engine that takes over needs to go on after the last token that was seen. Does not
own: processes (`engine.link`) or which requests are tried again (`engine.roster`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from msgspec import structs

from moestro.engine.stream import Stream
from moestro.scheduler.limits import Limits
from moestro.scheduler.sequence import ending
from moestro.types import Finish, Request, Timing, TokenEvent

CRASHES = 2  # in a row without a token between them make a request a suspect


@dataclass(slots=True, eq=False)
class Live:
    """One sequence that has not ended. Times are seconds on the handle's clock."""

    request: Request
    stream: Stream  # who reads its events
    opened: float
    tokens: list[int] = field(default_factory=list)  # everything that was emitted
    submitted: float | None = None  # to the engine that runs now; None while there is none
    seen: int = 0  # tokens when it was last submitted
    crashes: int = 0  # in a row, without a token between them
    resumed: bool = False  # has tokens of an engine that is gone
    first: Timing | None = None  # of the first event
    first_at: float = 0.0

    def submit(self, now: float) -> Request:
        """What to send to an engine that knows nothing of it."""
        self.submitted, self.seen = now, len(self.tokens)
        self.resumed = bool(self.tokens)
        return replace(self.request, generated=tuple(self.tokens))

    @property
    def suspect(self) -> bool:
        """It may be what the engine dies of: each try ended in a crash before its next token.

        A crash that a request causes comes back at the same token. One that it only happened to
        live through lets it go on, which clears it.
        """
        return self.crashes >= CRASHES

    @property
    def waits_for_token(self) -> bool:
        """It was submitted to the engine that runs now and has got nothing from it yet."""
        return self.submitted is not None and len(self.tokens) == self.seen

    def crashed(self) -> bool:
        """The engine that it was submitted to is gone; whether it is to be given up for that.

        Only a suspect is, one that was tried while nobody else waited for a token: a long prompt
        may be in two crashes that it has nothing to do with.
        """
        blamed = self.waits_for_token and self.suspect
        self.crashes = self.crashes + 1 if self.waits_for_token else 1
        self.submitted = None
        return blamed

    def take(self, event: TokenEvent, now: float) -> TokenEvent:
        """Record an event; returns it with times that count from the first engine."""
        self.tokens += event.token_ids
        if event.timing is None:
            return event
        timing = self._timing(event.timing, now)
        if self.first is None:
            self.first, self.first_at = timing, now
        elif event.finish is None:
            return structs.replace(event, timing=None)  # the first one was an earlier engine's
        return structs.replace(event, timing=timing)

    def end(self, limits: Limits) -> TokenEvent | None:
        """Its last event, when the tokens so far end it and only that event was lost."""
        if not self.tokens:
            return None
        sampling, last = self.request.sampling, self.tokens[-1]
        length = len(self.request.prompt) + len(self.tokens)
        finish = ending(sampling, last, len(self.tokens), length, limits)
        if finish is None:
            return None
        stops = last in sampling.stop_token_ids and last not in sampling.eos_token_ids
        stop = last if finish is Finish.STOP and stops else None
        return TokenEvent(self.request.id, finish=finish, stop_token=stop, timing=self.first)

    def _timing(self, timing: Timing, now: float) -> Timing:
        if self.first is None or not self.resumed:
            before = 0.0 if self.submitted is None else self.submitted - self.opened
            return structs.replace(timing, queued=timing.queued + before)
        return Timing(
            queued=self.first.queued,
            prefill=self.first.prefill,
            decode=now - self.first_at,
            exposed_fetch=self.first.exposed_fetch + timing.exposed_fetch,
            cached_tokens=self.first.cached_tokens,
            preemptions=self.first.preemptions + timing.preemptions,
        )
