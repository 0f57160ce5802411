"""A Responses request as a chat request. Owns: every field but `input` (`responses_input`)."""

from __future__ import annotations

from typing import Any

from moestro.errors import InvalidRequest
from moestro.server.dialect import (
    Fields,
    Names,
    fields_of,
    one_of,
    passed_on,
    refuse,
    string_of,
    wrong,
)
from moestro.server.refusals import Refused, UnknownKeys
from moestro.server.responses_schema import HOSTED, REFUSED_RESPONSES, ResponsesRequest

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
MODES = ("none", "auto", "required")

FIELDS = (
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"messages", "input"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
)
REASONING: Refused = {
    # There is no summarizer; "auto" takes the best there is, which is none.
    "summary": (("auto",), "reasoning is shown as it is, not summarized"),
    "generate_summary": (("auto",), "reasoning is shown as it is, not summarized"),
    "context": (("auto",), "the chat template decides which reasoning is shown"),
    "mode": (("standard",), "there is one mode"),
}
TEXT: Refused = {"verbosity": (("medium",), "say so in the instructions")}
STREAM: Refused = {"include_obfuscation": ((False,), "padding is not offered")}
FUNCTION: Refused = {
    "async": ((False,), "a call is made by the client, in its own time"),
    "defer_loading": ((False,), "all tools are shown to the model"),
    "allowed_callers": ((["direct"],), "only the model calls"),
    "output_schema": ((), "what a tool answers is not checked"),
}


def names_of(origins: list[str]) -> Names:
    """Return how chat's fields are called here."""
    return Names(origins, FIELDS)


def chat_body(request: ResponsesRequest, messages: list[Fields], unknown: UnknownKeys) -> Fields:
    """Return the chat request. Raises `InvalidRequest` in the words of Responses."""
    extra = request.model_extra or {}
    body = passed_on(extra, REFUSED_RESPONSES, unknown, "/v1/responses")
    if request.stream_options is not None:
        refuse(fields_of(request.stream_options, "stream_options"), "stream_options", STREAM)
    _check_metadata(request.metadata or {})
    return {
        **body,
        "model": request.model,
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "tools": _tools(request.tools),
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "include_reasoning": request.include_reasoning,
        "reasoning_effort": _effort(request.reasoning),
        **_format(request.text),
        **_logprobs(request),
    }


def sealed_wanted(request: ResponsesRequest) -> bool:
    """Whether reasoning is to be given as `encrypted_content` too."""
    return SEALED_REASONING in (request.include or ())


def _check_metadata(metadata: dict[str, str]) -> None:
    if any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise wrong("metadata", "may have keys of 64 and values of 512 characters")


def _effort(raw: Any) -> Any:
    found = fields_of(raw, "reasoning") if raw is not None else {}
    refuse(found, "reasoning", REASONING)
    effort = found.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise wrong("reasoning.effort", "must be a string")
    return effort


def _format(raw: Any) -> Fields:
    """Return `response_format`, which text.format is without its inner object."""
    found = fields_of(raw, "text") if raw is not None else {}
    refuse(found, "text", TEXT)
    if "format" not in found:
        return {}
    form = fields_of(found["format"], "text.format")
    kind = one_of(form.get("type"), "text.format.type", ("text", "json_object", "json_schema"))
    if kind != "json_schema":
        return {"response_format": {"type": kind}}
    schema = {key: value for key, value in form.items() if key != "type"}
    return {"response_format": {"type": kind, "json_schema": schema}}


def _logprobs(request: ResponsesRequest) -> Fields:
    wanted = [name for name in request.include or () if name != SEALED_REASONING]
    if any(name != LOGPROBS for name in wanted):
        raise InvalidRequest(
            f"'include' may only hold {LOGPROBS} and {SEALED_REASONING}.", param="include"
        )
    if wanted:
        return {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.top_logprobs:
        raise InvalidRequest(
            f"'top_logprobs' needs 'include' to hold {LOGPROBS}.", param="top_logprobs"
        )
    return {}


def _tools(given: list[Any] | None) -> list[Fields]:
    return [_tool(tool, f"tools.{i}") for i, tool in enumerate(given or ())]


def _tool(raw: Any, at: str) -> Fields:
    tool = fields_of(raw, at)
    kind = tool.pop("type", None)
    if kind != "function":
        named = f"'{kind}' is" if isinstance(kind, str) and len(kind) <= 64 else "this is"
        raise wrong(f"{at}.type", f"must be 'function', {named} not: {HOSTED}")
    refuse(tool, at, FUNCTION)
    return {
        "type": "function",
        "function": {key: value for key, value in tool.items() if key not in FUNCTION},
    }


def _tool_choice(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice if choice is None else one_of(choice, "tool_choice", MODES)
    found = fields_of(choice, "tool_choice")
    if found.get("type") != "function":
        raise wrong("tool_choice.type", f"must be 'function': {HOSTED}")
    return {"type": "function", "function": {"name": string_of(found, "name", "tool_choice")}}
