"""POST /v1/completions, up to admission. Owns: the four shapes of a prompt, and echo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moestro.errors import InvalidRequest
from moestro.server.call import Call, Draft, Prompt, check_shape, draft_of, make_call, output_of
from moestro.server.refusals import REFUSED, check_best_of, check_extra
from moestro.server.sampling import build, choices, stop_rules, token_budget, whole
from moestro.server.schema import CompletionRequest, validate
from moestro.server.service import Service
from moestro.server.structured import constraint_of
from moestro.server.structured_plan import Plan
from moestro.server.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint

Given = str | list[int]


async def prepare_completion(service: Service, body: dict[str, Any], arrived: float) -> Call:
    """Return the call that a request body asks for. Raises `InvalidRequest` and its kin."""
    request = validate(CompletionRequest, body)
    extra = dict(request.model_extra or {})
    n = choices(request, service.settings)
    check_best_of(extra, n)
    extra.pop("best_of", None)
    check_extra(extra, REFUSED, service.unknown)
    model = service.model_name(request.model)
    draft = _draft(request, service, n)
    constraint = constraint_of(request)
    longest = service.info().max_model_len
    given = prompts_of(request.prompt, service.settings.max_prompts, longest)
    for ids in given:
        check_ids(ids, service.vocabulary().size, "prompt")
    special = request.add_special_tokens is not False
    tokenizer, skip = service.text.tokenizer, draft.output.skip_special
    size = sum(map(len, given))
    prompts = await service.text.run(_encode, tokenizer, given, special, skip, size=size)
    if constraint is not None:
        grammar = await service.grammars.grammar(Plan(constraint))
        output = replace(draft.output, bound_by=constraint.param)
        draft = replace(draft, params=replace(draft.params, grammar=grammar), output=output)
    return make_call(
        draft,
        prompts,
        prefix="cmpl-",
        param="prompt",
        model=model,
        max_model_len=longest,
        arrived=arrived,
    )


def _draft(request: CompletionRequest, service: Service, n: int) -> Draft:
    settings = service.settings
    check_shape(request)
    stops = stop_rules(request, settings)
    echo = bool(request.echo)
    asked = whole("max_tokens", request.max_tokens, DEFAULT_MAX_TOKENS, 0 if echo else 1, None)
    top = None
    if request.logprobs is not None:
        top = whole("logprobs", request.logprobs, 0, 0, settings.max_logprobs)
    params = replace(
        build(request, settings.defaults, service.vocabulary()),
        logprobs=top,
        prompt_logprobs=top if echo else None,
    )
    output = replace(
        output_of(request, stops),
        logprobs=top,
        echo=echo,
        discard=asked == 0,
        continuing=True,
    )
    return draft_of(request, params, asked=asked, n=n, output=output)


def prompts_of(prompt: Any, most: int, longest: int) -> list[Given]:
    """Return a list of prompts from a string, token ids, or a list of either.

    Raises `InvalidRequest` for every other shape, for mixed lists and for more than `most`, and
    `ContextTooLong` for ids beyond `longest`, before looking at each of them.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        raise InvalidRequest("'prompt' is required.", param="prompt")
    if not isinstance(prompt, list) or not prompt:
        raise _bad_shape()
    if type(prompt[0]) is int:
        return [_ids(prompt, longest)]
    if len(prompt) > most:
        raise InvalidRequest(
            f"'prompt' may hold {most} prompts, not {len(prompt)}.", param="prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) for item in prompt):
        return [_ids(item, longest) for item in prompt]
    raise _bad_shape()


def _ids(ids: list[Any], longest: int) -> list[int]:
    token_budget(None, ids, longest, param="prompt")
    if not all(type(item) is int for item in ids):
        raise _bad_shape()
    return ids


def _bad_shape() -> InvalidRequest:
    return InvalidRequest(
        "'prompt' must be a string, an array of strings, an array of token ids, or an array of "
        "arrays of token ids, and not empty.",
        param="prompt",
    )


def check_ids(ids: Given, vocabulary: int, param: str) -> None:
    """Raise `InvalidRequest` for a token id outside the vocabulary. Text passes."""
    if isinstance(ids, str) or not ids:
        return
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise InvalidRequest(
            f"Token ids in '{param}' must be from 0 to {vocabulary - 1}.", param=param
        )


def _encode(
    tokenizer: Tokenizer, given: Sequence[Given], special: bool, skip_special: bool
) -> list[Prompt]:
    """Blocking: runs in the thread pool."""
    prompts = []
    for item in given:
        if isinstance(item, str):
            prompts.append(Prompt(tuple(tokenizer.encode(item, special=special)), item))
        else:
            text = tokenizer.decode(item, skip_special=skip_special)
            prompts.append(Prompt(tuple(item), text))
    return prompts
