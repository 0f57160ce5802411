"""Plain values that travel between the server, the engine and the scheduler.

Owns: what a request is once text is gone, and what comes back per step. Everything here is
frozen, has no torch and no text, and can be encoded by msgspec as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec


class Finish(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # EOS, a stop token, or (decided by the server) a stop string
    LENGTH = "length"  # max_tokens, the context, or the whole KV pool used up
    ABORT = "abort"  # the client left
    ERROR = "error"  # a step failed


GRAMMAR_FAULT = "invalid_grammar: "  # begins a `TokenEvent.error` that the grammar is to blame for


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole output must match, in the three notations of llguidance.

    `json_schema`: a JSON schema. `regex`: a regular expression. `lark`: llguidance's Lark dialect,
    which may embed a schema (`%json {...}`) and special tokens by name or id.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens for one sequence. Already validated; every field has its final value.

    `seed` is always set (the server draws one when the user gave none); the random number for
    output position p is a function of (seed, p) alone, so a batch does not change it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0  # 0 <= seed < 2**64
    eos_token_ids: tuple[int, ...] = ()  # empty when ignore_eos
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # number of alternatives per output token; None = no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens (completions with echo)
    grammar: Grammar | None = None  # EOS and stop tokens only where it may end, or as its own end


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to run: a prompt and how to continue it. `n` choices are n of these."""

    id: str  # unique, made by the server
    prompt: tuple[int, ...]  # token ids, at least one
    sampling: SamplingParams
    priority: int = 0  # lower runs first
    cache_salt: str | None = None  # prefix reuse only among equal salts
    generated: tuple[int, ...] = ()  # outputs of an earlier engine: go on after them
    background: bool = False  # nobody waits for it: it takes no place in the queue from others


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, from the raw logits (before penalties and temperature)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step gave one sequence. `finish` is set on the last event of a sequence.

    An EOS or stop token is in `token_ids` (it counts as generated) and ends them.
    `stop_token` is that token's id when a `stop_token_ids` entry (not EOS) ended the sequence.
    There is one for each token, so it is made, sent and read by msgspec.
    """

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id when asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # first event only; [0] is None
    finish: Finish | None = None
    stop_token: int | None = None
    error: str | None = None
    timing: Timing | None = None  # on the first and on the last event


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a request's time went so far, in seconds on the engine's clock, and what it reused."""

    queued: float  # arrival to first scheduled
    prefill: float  # first scheduled to first token
    decode: float  # first token to now
    exposed_fetch: float  # of prefill + decode: compute stood still for an expert
    cached_tokens: int  # prompt tokens whose KV was reused
    preemptions: int
