"""POST /v1/chat/completions, up to admission. Owns: what is particular to chat in a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moestro.errors import InvalidRequest
from moestro.server.answer import AnswerFormat
from moestro.server.call import Call, Draft, Prompt, check_shape, draft_of, make_call, output_of
from moestro.server.chat_plan import for_prompt, opened, plan_of
from moestro.server.refusals import REFUSED_CHAT, check_extra
from moestro.server.sampling import build, choices, stop_rules, whole
from moestro.server.schema import ChatRequest, TokenizeRequest, validate
from moestro.server.service import Service
from moestro.server.settings import ServerSettings
from moestro.server.template import RenderOptions
from moestro.server.tools_choose import MARKS, NONE, reasoning_parser, tool_parser
from moestro.server.tools_request import checked_tools, schemas_of
from moestro.server.tools_rules import choice_of

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


async def prepare_chat(
    service: Service, body: dict[str, Any], arrived: float, *, prefix: str = "chatcmpl-"
) -> Call:
    """Return the call that a request body asks for. Raises `InvalidRequest` and its kin.

    `prefix`: what the call's id starts with.
    """
    request = checked_chat(service, body)
    model = service.model_name(request.model)
    draft = _draft(request, service)
    form = answer_format(request, service)
    plan = plan_of(request, service)
    rendered, ids = await chat_prompt(service, request)
    form = replace(form, opened=opened(request, rendered, MARKS.get(form.reasoning)))
    params = draft.params
    if plan:
        grammar = await service.grammars.grammar(for_prompt(plan, request, rendered))
        params = replace(params, grammar=grammar)
    output = replace(
        draft.output,
        format=form if form.stages() else None,
        bound_by=plan.param if plan else None,
    )
    return make_call(
        replace(draft, params=params, output=output),
        [Prompt(ids)],
        prefix=prefix,
        param="messages",
        model=model,
        max_model_len=service.info().max_model_len,
        arrived=arrived,
    )


def checked_chat(service: Service, body: dict[str, Any]) -> ChatRequest:
    """Return the typed request. Raises `InvalidRequest` for a wrong type or a refused field."""
    request = validate(ChatRequest, body)
    check_extra(request.model_extra or {}, REFUSED_CHAT, service.unknown)
    return request


async def chat_prompt(service: Service, request: ChatRequest) -> tuple[str, tuple[int, ...]]:
    """Return the rendered conversation, as text and as token ids. Raises `InvalidRequest`."""
    variables = {**effort_variables(request), **tool_variables(request.tools)}
    options = render_options(request, service.settings, variables)
    rendered = await service.text.render(
        request.messages, options, service.settings.template_timeout
    )
    return rendered, await service.text.encode(rendered, special=bool(request.add_special_tokens))


def _draft(request: ChatRequest, service: Service) -> Draft:
    settings = service.settings
    check_shape(request)
    stops = stop_rules(request, settings)
    top = _top_logprobs(request, settings.max_logprobs)
    params = build(request, settings.defaults, service.vocabulary())
    return draft_of(
        request,
        replace(params, logprobs=top),
        asked=_asked(request),
        n=choices(request, settings),
        output=replace(
            output_of(request, stops),
            logprobs=top,
            continuing=bool(request.continue_final_message),
        ),
    )


def _asked(request: ChatRequest) -> int | None:
    """The caller's limit, or None for the rest of the context. Of two names the newer wins."""
    limits = [
        whole(name, value, 0, 1, None)
        for name in ("max_tokens", "max_completion_tokens")
        if (value := getattr(request, name)) is not None
    ]
    return limits[-1] if limits else None


def _top_logprobs(request: ChatRequest, most: int) -> int | None:
    top = whole("top_logprobs", request.top_logprobs, 0, 0, most)
    if request.logprobs:
        return top
    if top:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    return None


def effort_variables(request: ChatRequest) -> dict[str, Any]:
    """Return what `reasoning_effort` tells the template; the templates know two names for it."""
    effort = request.reasoning_effort
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"'reasoning_effort' must be one of {', '.join(EFFORTS)}.", param="reasoning_effort"
        )
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def tool_variables(given: list[Any] | None) -> dict[str, Any]:
    """Return what the template is told of the tools."""
    tools = checked_tools(given)
    return {"tools": tools} if tools else {}


def answer_format(request: ChatRequest, service: Service) -> AnswerFormat:
    """Return how the answer is taken apart. Raises when tools cannot be honoured."""
    tools = checked_tools(request.tools)
    choice = choice_of(request.tool_choice, tools)
    callable = choice.mode != "none"
    settings, template = service.settings, service.text.template
    source = template.source if template is not None else ""
    parser = tool_parser(settings.tool_call_parser, source, settings.model_type)
    if tools and template is not None:
        _check_able(source, parser if callable else None)
    kind = reasoning_parser(settings.reasoning_parser, source, settings.model_type)
    return AnswerFormat(
        tools=parser,
        reasoning=kind if request.separate_reasoning is not False else NONE,
        callable=callable,
        schemas=schemas_of(tools),
        parallel=request.parallel_tool_calls is not False,
        named=choice.named,
        show_reasoning=request.include_reasoning is not False,
    )


def _check_able(template: str, parser: str | None) -> None:
    if "tools" not in template:
        raise InvalidRequest(
            "'tools' is not supported: the chat template of this model shows no tools.",
            param="tools",
        )
    if parser == NONE:
        raise InvalidRequest(
            "'tools' is not supported: how this model writes calls is not known here; "
            "the server's --tool-call-parser can say, or use tool_choice 'none'.",
            param="tools",
        )


def render_options(
    request: ChatRequest | TokenizeRequest,
    settings: ServerSettings,
    variables: Mapping[str, Any],
) -> RenderOptions:
    """Return how to render: the server's template variables under the request's own."""
    return RenderOptions(
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables={
            **settings.chat_template_kwargs,
            **variables,
            **(request.chat_template_kwargs or {}),
        },
    )
