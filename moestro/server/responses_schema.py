"""The wire model of POST /v1/responses, and its fields that are refused by name."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from moestro.server.refusals import REFUSED_CHAT, Refused
from moestro.server.schema import Bool, Float, Int, Str, Wire

STATELESS = "responses are not kept: send the whole conversation as input"
HOSTED = "only functions can be called here"
ELSEWHERE = "it belongs to /v1/chat/completions"


class ResponsesRequest(Wire):
    """POST /v1/responses. What is inside `input` and the objects is checked where it is read."""

    model: Str | None = None
    input: Str | list[Any]
    instructions: Str | None = None
    max_output_tokens: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    stream: Bool | None = None
    stream_options: dict[Str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Bool | None = None
    text: dict[Str, Any] | None = None
    reasoning: dict[Str, Any] | None = None
    metadata: dict[Str, Str] | None = Field(None, max_length=16)
    include: list[Str] | None = None
    top_logprobs: Int | None = None
    user: Str | None = None
    safety_identifier: Str | None = None
    prompt_cache_key: Str | None = None
    include_reasoning: Bool | None = None


REFUSED_RESPONSES: Refused = {
    **REFUSED_CHAT,
    "previous_response_id": ((), STATELESS),
    "conversation": ((), STATELESS),
    "store": ((False,), "responses are not kept; send false or leave it out"),
    "background": ((False,), "an answer comes in the reply"),
    "background_options": ((), "an answer comes in the reply"),
    "prompt": ((), "there are no stored prompts; send input"),
    "prompt_cache_options": ((), "prompts that start alike share their cache by themselves"),
    "truncation": (("disabled",), "shorten the input before sending it"),
    "context_management": (([],), "shorten the input before sending it"),
    "max_tool_calls": ((), HOSTED),
    "moderation": ((), "there is no moderation here"),
    "access_programs": ((), "there are no access programs here"),
    "image": ((), "this model reads text"),
    "modalities": ((), "an answer is always text"),
    "max_tokens": ((), "use max_output_tokens"),
    "max_completion_tokens": ((), "use max_output_tokens"),
    "messages": ((), "use input"),
    "response_format": ((), "use text.format"),
    "reasoning_effort": ((), "use reasoning.effort"),
    "logprobs": ((), "use include with message.output_text.logprobs"),
    "n": ((1,), "a response is one answer"),
}
