"""One sequence on its way: what it has, where it stands and how long it took.

Owns: the state of a sequence and what follows from it alone (does it end with this token, how
much of its prompt is left). Does not own: blocks (`kv_cache`) or who goes next (`scheduler`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from moestro.kv_cache.prefix import Chain
from moestro.scheduler.limits import Limits
from moestro.types import Finish, Request, SamplingParams, Timing, TokenLogprobs


class Status(Enum):
    """Where a sequence is. Only a waiting one holds no blocks."""

    WAITING = "waiting"
    SWEEPING = "sweeping"  # its prompt is being computed, or waits for the next sweep
    DECODING = "decoding"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that lives. Compared by identity: an id may come back after its end."""

    request: Request
    arrival: int  # order of arrival, never changes
    arrived: float  # seconds
    chain: Chain  # of `tokens` as they were when it last began to wait
    tokens: list[int]  # prompt and outputs
    id: str = field(init=False)
    order: tuple[int, int] = field(init=False)  # runs before those with a higher one
    status: Status = Status.WAITING
    computed: int = 0  # leading tokens whose KV is in the cache
    launched: deque[int] = field(default_factory=deque)  # decode steps whose result is unknown
    held: bool = False  # it may not start yet: its grammar is being compiled
    sweep: int | None = None  # number of the open sweep it is in
    awaits: bytes | None = None  # key of a block that an open sweep computes for it as well
    started: float | None = None
    first_token: float | None = None
    exposed: float = 0.0
    cached: int = 0
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.order = (self.request.priority, self.arrival)

    @property
    def outputs(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def ahead(self) -> int:
        """Length it has reached once all launched steps are read."""
        return len(self.tokens) + len(self.launched)

    def ends_before(self, limits: Limits) -> bool:
        """Whether a launched step will end it by length, whatever it samples."""
        if not self.launched:
            return False
        outputs = self.outputs + len(self.launched)
        return outputs >= self.request.sampling.max_tokens or _full(self.ahead, limits)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the first event: then every prompt position must be computed."""
        return self.request.sampling.prompt_logprobs is not None and self.outputs == 0

    def timing(self, now: float) -> Timing:
        """Where its time went until `now`."""
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        return Timing(
            queued=started - self.arrived,
            prefill=first - started,
            decode=now - first,
            exposed_fetch=self.exposed,
            cached_tokens=self.cached,
            preemptions=self.preemptions,
        )

    def fault_of(self, token: int, limits: Limits) -> str | None:
        """Why `token` cannot have been sampled after its tokens so far, or None."""
        if not 0 <= token < limits.vocab_size:
            return f"token id {token} was sampled from a vocabulary of {limits.vocab_size}"
        sampling = self.request.sampling
        least = 0 if sampling.grammar else sampling.min_tokens  # it gives way to a grammar
        if self.outputs < least and (
            token in sampling.eos_token_ids or token in sampling.stop_token_ids
        ):
            return f"token id {token} was sampled before min_tokens ({sampling.min_tokens})"
        return None

    def finish(self, limits: Limits) -> Finish | None:
        """Why it ends with its last token, or None when it goes on."""
        sampling, last = self.request.sampling, self.tokens[-1]
        if not self.outputs:
            return Finish.LENGTH  # max_tokens is 0: it came for the prompt's logprobs
        return ending(sampling, last, self.outputs, len(self.tokens), limits)

    def stop_token(self) -> int | None:
        """The last token, when it ends the sequence and is no EOS."""
        sampling, last = self.request.sampling, self.tokens[-1]
        stops = last in sampling.stop_token_ids and last not in sampling.eos_token_ids
        return last if stops else None


def ending(
    sampling: SamplingParams, last: int, outputs: int, length: int, limits: Limits
) -> Finish | None:
    """Why `last`, output number `outputs` of a sequence of `length` tokens, ends it, or None."""
    if last in sampling.eos_token_ids or last in sampling.stop_token_ids:
        return Finish.STOP
    full = _full(length, limits)
    return Finish.LENGTH if full or outputs >= sampling.max_tokens else None


def _full(length: int, limits: Limits) -> bool:
    """No next token. It would need the KV of all so far, so kv_tokens of them may still go on."""
    return length >= limits.max_model_len or length > limits.kv_tokens
