"""One admitted call as plain values. Owns: what a call is between validation and the reply.

Does not own: how it got there (`chat`, `completions`) or how it runs (`generation`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moestro.errors import InvalidRequest
from moestro.server.answer import AnswerFormat
from moestro.server.sampling import StopRules, fit, seed_of, seed_of_choice, token_budget
from moestro.server.schema import GenerationRequest
from moestro.types import Request, SamplingParams

INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that `echo` shows."""

    ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """How the reply is to look."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stops: StopRules = field(default_factory=StopRules)
    skip_special: bool = True
    continuing: bool = False  # the text goes on after the prompt's: keep a leading space
    logprobs: int | None = None  # alternatives per token; None = no logprobs at all
    token_ids: bool = False
    ids_as_tokens: bool = False  # spell tokens in logprobs as "token_id:<n>"
    echo: bool = False
    format: AnswerFormat | None = None  # how the text is taken apart; None = it is all content
    bound_by: str | None = None  # the field that says what the grammar holds the answer to
    discard: bool = False  # nothing may be generated: the one token the engine makes is dropped

    @property
    def detailed(self) -> bool:
        """True when text and tokens of each piece must describe each other."""
        return self.logprobs is not None or self.token_ids


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: `len(prompts) * n` sequences, in the order of their choice index."""

    id: str
    model: str
    created: int  # wall clock, seconds
    arrived: float  # monotonic clock, seconds
    prompts: tuple[Prompt, ...]
    n: int
    requests: tuple[Request, ...]
    output: Output
    shown: Mapping[str, Any] = field(default_factory=dict)  # what the reply repeats of the request

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once however many choices it has."""
        return sum(len(prompt.ids) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Draft:
    """A call's sampling side before its prompts are known. `asked` is the caller's max_tokens."""

    params: SamplingParams
    asked: int | None
    n: int
    seed: int | None
    priority: int
    cache_salt: str | None
    output: Output


def make_call(
    draft: Draft,
    prompts: Sequence[Prompt],
    *,
    prefix: str,
    param: str,
    model: str,
    max_model_len: int,
    arrived: float,
) -> Call:
    """Return the call with one engine request per choice.

    Raises `ContextTooLong` for a prompt that leaves no room, `InvalidRequest` for an empty one;
    both name `param`, the field that the prompts came from.
    """
    id = prefix + secrets.token_hex(12)
    requests: list[Request] = []
    for prompt in prompts:
        if not prompt.ids:
            raise InvalidRequest("The prompt is empty: it gives no tokens.", param=param)
        asked = 1 if draft.output.discard else draft.asked
        budget = token_budget(asked, prompt.ids, max_model_len, param=param)
        requests += _choices(draft, prompt, fit(draft.params, budget, asked), id, len(requests))
    return Call(
        id=id,
        model=model,
        created=int(time.time()),
        arrived=arrived,
        prompts=tuple(prompts),
        n=draft.n,
        requests=tuple(requests),
        output=draft.output,
    )


def _choices(
    draft: Draft, prompt: Prompt, params: SamplingParams, id: str, first: int
) -> list[Request]:
    """Return the requests of one prompt; their choice indices begin at `first`."""
    return [
        Request(
            id=f"{id}-{first + i}",
            prompt=prompt.ids,
            sampling=replace(params, seed=seed_of_choice(draft.seed, i)),
            priority=draft.priority,
            cache_salt=draft.cache_salt,
        )
        for i in range(draft.n)
    ]


def priority_of(request: GenerationRequest) -> int:
    """Return the priority, lower first. Raises when it is no 64-bit integer."""
    value = request.priority or 0
    if not -INT64 <= value < INT64:
        raise InvalidRequest("'priority' must be a 64-bit integer.", param="priority")
    return value


def salt_of(request: GenerationRequest) -> str | None:
    """Return the cache salt. Raises when it is empty, too long or holds a separator."""
    salt = request.cache_salt
    if salt is None:
        return None
    if not 1 <= len(salt) <= 128 or any(char in "@/\\\0" for char in salt):
        raise InvalidRequest(
            "'cache_salt' must have 1 to 128 characters, none of them @ / \\ or NUL.",
            param="cache_salt",
        )
    return salt


def check_shape(request: GenerationRequest) -> None:
    """Refuse combinations that are no matter of range."""
    if request.spaces_between_special_tokens is False:
        raise InvalidRequest(
            "'spaces_between_special_tokens' can only be true.",
            param="spaces_between_special_tokens",
        )
    options = request.stream_options
    if options is not None and options.model_dump(exclude_none=True) and not request.stream:
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )


def output_of(request: GenerationRequest, stops: StopRules) -> Output:
    """Return the part of the output options that chat and completions share."""
    options = request.stream_options
    everywhere = bool(options and options.continuous_usage_stats)
    return Output(
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=everywhere and bool(options and options.include_usage),
        stops=stops,
        skip_special=request.skip_special_tokens is not False,
        token_ids=bool(request.return_token_ids),
        ids_as_tokens=bool(request.return_tokens_as_token_ids),
    )


def draft_of(
    request: GenerationRequest,
    params: SamplingParams,
    *,
    asked: int | None,
    n: int,
    output: Output,
) -> Draft:
    """Return the sampling side of a call."""
    return Draft(
        params=params,
        asked=asked,
        n=n,
        seed=seed_of(request.seed),
        priority=priority_of(request),
        cache_salt=salt_of(request),
        output=output,
    )
