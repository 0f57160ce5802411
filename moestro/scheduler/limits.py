"""What is refused before it is queued, and with which words.

Owns: the limits of one engine and the check of a request against them. Does not own: the ranges
of sampling values, which `server` checks when it reads the request.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from moestro.errors import ContextTooLong, InvalidRequest, QueueFull
from moestro.types import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can take. Lengths are in tokens."""

    max_model_len: int  # prompt and output of one sequence together
    max_num_seqs: int  # sequences that run at the same time
    max_num_queued: int  # sequences beyond those
    vocab_size: int
    kv_tokens: int  # what the KV pool holds
    max_sweep_tokens: int  # prompt tokens that travel up the layers together

    def __post_init__(self) -> None:
        for name in self.__slots__:
            assert getattr(self, name) > (-1 if name == "max_num_queued" else 0), name


def check(request: Request, limits: Limits, queued: int) -> None:
    """Raise the error to answer `request` with, if it cannot be served.

    `queued` is how many sequences live beyond `max_num_seqs`, those that wait for a seat; it is
    negative while seats are free. Background sequences are neither counted nor refused here: who
    sends them sends only so many at a time.
    """
    _check_tokens(request, limits)
    _check_length(request, limits)
    _check_counts(request)
    if queued >= limits.max_num_queued and not request.background:
        raise QueueFull(
            f"The queue is full: {limits.max_num_queued} requests wait behind "
            f"{limits.max_num_seqs} that run. Try again later."
        )


def _check_tokens(request: Request, limits: Limits) -> None:
    sampling = request.sampling
    if not request.prompt:
        raise InvalidRequest("The prompt is empty: at least one token is needed.", param="prompt")
    _check_ids(request.prompt, limits, "prompt")
    _check_ids(request.generated, limits, "prompt")
    _check_ids(sampling.stop_token_ids, limits, "stop_token_ids")
    _check_ids(sampling.logit_bias, limits, "logit_bias")


def _check_ids(ids: Collection[int], limits: Limits, param: str) -> None:
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(
            f"Token id {wrong} in {param} is out of the vocabulary: "
            f"ids go from 0 to {limits.vocab_size - 1}.",
            param=param,
        )


def _check_length(request: Request, limits: Limits) -> None:
    prompt = len(request.prompt) + len(request.generated)
    output = min(1, request.sampling.max_tokens)
    if prompt + output > limits.max_model_len:
        raise ContextTooLong(
            f"This model's maximum context length is {limits.max_model_len} tokens, but the "
            f"prompt has {prompt} and at least {output} must be generated.",
            param="prompt",
        )
    # The last token needs no KV of its own: whoever got so far may go on where it stopped.
    needed = prompt if request.generated else prompt + output
    if needed > limits.kv_tokens:
        raise ContextTooLong(
            f"This server's maximum context length is {limits.kv_tokens} tokens, as many as its "
            f"KV cache holds, but the prompt has {prompt} and at least {output} must be generated.",
            param="prompt",
        )


def _check_counts(request: Request) -> None:
    sampling = request.sampling
    if sampling.max_tokens < 0:
        raise InvalidRequest(
            f"max_tokens is {sampling.max_tokens}, less than 0.", param="max_tokens"
        )
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}; it must be from 0 to max_tokens, "
            f"{sampling.max_tokens}.",
            param="min_tokens",
        )
    if request.generated and len(request.generated) >= sampling.max_tokens:
        raise InvalidRequest(
            f"{len(request.generated)} tokens are generated already and max_tokens is "
            f"{sampling.max_tokens}.",
            param="max_tokens",
        )
