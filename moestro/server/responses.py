"""POST /v1/responses, up to admission. Owns: the way from its request to a chat call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moestro.errors import InvalidRequest
from moestro.server.call import Call
from moestro.server.chat import prepare_chat
from moestro.server.dialect import Fields, called
from moestro.server.responses_input import messages_of
from moestro.server.responses_request import chat_body, names_of, sealed_wanted
from moestro.server.responses_schema import ResponsesRequest
from moestro.server.schema import validate
from moestro.server.service import Service

ALWAYS: Fields = {
    "background": False,
    "previous_response_id": None,
    "service_tier": None,
    "store": False,
    "truncation": "disabled",
}


async def prepare_responses(service: Service, body: dict[str, Any], arrived: float) -> Call:
    """Return the call that a request body asks for. Raises `InvalidRequest` and its kin."""
    request = validate(ResponsesRequest, body)
    messages, origins = messages_of(request.input, request.instructions)
    chat = chat_body(request, messages, service.unknown)
    names = names_of(origins)
    with called(names):
        call = await prepare_chat(service, chat, arrived, prefix="resp_")
    if call.output.logprobs is not None and call.output.format is not None:
        raise InvalidRequest(
            "'include': log-probabilities are not available where calls or reasoning are told "
            "apart from the text.",
            param="include",
        )
    return replace(names.call(call), shown=_shown(request, call))


def _shown(request: ResponsesRequest, call: Call) -> Fields:
    """Return what the response repeats, with the values that hold."""
    params = call.requests[0].sampling
    effort = (request.reasoning or {}).get("effort")
    return {
        **ALWAYS,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": params.temperature,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"strict": False, "parameters": None, **tool} for tool in request.tools or ()],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "sealed": sealed_wanted(request),
    }
