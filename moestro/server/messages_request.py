"""A Messages request as a chat request. Owns: every field but the messages (`messages_input`)."""

from __future__ import annotations

from typing import Any

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
from moestro.server.messages_schema import (
    REFUSED_MESSAGES,
    SERVERS,
    CountTokensRequest,
    MessagesRequest,
)
from moestro.server.refusals import Refused, UnknownKeys

FIELDS = (
    (r"max_completion_tokens", "max_tokens"),
    (r"stop", "stop_sequences"),
    (r"reasoning_effort", "output_config.effort"),
    (r"response_format\.json_schema", "output_config.format"),
    (r"response_format", "output_config.format"),
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
)
TOOL: Refused = {
    "allowed_callers": ((["direct"],), "only the model calls"),
    "defer_loading": ((False,), "all tools are shown to the model"),
    "input_examples": (([],), "put them into the description"),
}
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": None}
LEAST_BUDGET = 1024
EFFORTS = ((4096, "low"), (16384, "medium"))  # thinking budgets under so many tokens


def names_of(origins: list[str]) -> Names:
    """Return how chat's fields are called here."""
    return Names(origins, FIELDS, too_long="prompt is too long: ")


def chat_body(request: CountTokensRequest, messages: list[Fields], unknown: UnknownKeys) -> Fields:
    """Return the chat request. Raises `InvalidRequest` in the words of Messages."""
    body = passed_on(request.model_extra or {}, REFUSED_MESSAGES, unknown, "/v1/messages")
    body |= {
        "model": request.model,
        "messages": messages,
        "tools": [_tool(tool, f"tools.{i}") for i, tool in enumerate(request.tools or ())],
        **_tool_choice(request.tool_choice),
        **_thinking(request),
        **_format(request.output_config),
        **_prefill(messages),
    }
    if isinstance(request, MessagesRequest):
        body |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
    return body


def _prefill(messages: list[Fields]) -> Fields:
    """A last message of the assistant is the start of the answer."""
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    if "tool_calls" in last:
        raise wrong("messages", "must answer the last tool_use with a tool_result")
    return {"continue_final_message": True, "add_generation_prompt": False}


def _tool(raw: Any, at: str) -> Fields:
    tool = fields_of(raw, at)
    kind = tool.get("type", "custom")
    if kind != "custom":
        named = f"'{kind}' is" if isinstance(kind, str) and len(kind) <= 64 else "this is"
        raise wrong(f"{at}.type", f"must be 'custom', {named} not: {SERVERS}")
    refuse(tool, at, TOOL)
    if "input_schema" not in tool:
        raise wrong(f"{at}.input_schema", "is required")
    function = {key: tool[key] for key in ("name", "description", "strict") if key in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: Fields | None) -> Fields:
    if choice is None:
        return {}
    kind = one_of(choice.get("type"), "tool_choice.type", tuple(CHOICES))
    single = choice.get("disable_parallel_tool_use")
    if not (single is None or isinstance(single, bool)):
        raise wrong("tool_choice.disable_parallel_tool_use", "must be true or false")
    chosen: Any = CHOICES[kind]
    if kind == "tool":
        chosen = {
            "type": "function",
            "function": {"name": string_of(choice, "name", "tool_choice")},
        }
    return {"tool_choice": chosen, "parallel_tool_calls": not single}


def _thinking(request: CountTokensRequest) -> Fields:
    """Return how much the model is to think.

    Models here know an effort, not a budget: a budget is told to the template as one.
    """
    config = fields_of(request.output_config or {}, "output_config")
    found = fields_of(request.thinking or {"type": "adaptive"}, "thinking")
    kind = one_of(found.get("type"), "thinking.type", ("enabled", "disabled", "adaptive"))
    told: Fields = {}
    if "display" in found:
        shown = one_of(found["display"], "thinking.display", ("summarized", "omitted"))
        told["include_reasoning"] = shown != "omitted"
    if kind == "disabled":
        return told | {"reasoning_effort": "none"}
    if kind == "enabled":
        told["reasoning_effort"] = _effort(found.get("budget_tokens"), request)
    if "effort" in config:
        efforts = ("low", "medium", "high", "xhigh", "max")
        told["reasoning_effort"] = one_of(config["effort"], "output_config.effort", efforts)
    return told


def _effort(budget: Any, request: CountTokensRequest) -> str:
    at = "thinking.budget_tokens"
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < LEAST_BUDGET:
        raise wrong(at, f"must be an integer of at least {LEAST_BUDGET}")
    if isinstance(request, MessagesRequest) and budget >= request.max_tokens:
        raise wrong(at, f"must be less than max_tokens, which is {request.max_tokens}")
    return next((effort for below, effort in EFFORTS if budget < below), "high")


def _format(raw: Fields | None) -> Fields:
    form = (raw or {}).get("format")
    if form is None:
        return {}
    found = fields_of(form, "output_config.format")
    one_of(found.get("type"), "output_config.format.type", ("json_schema",))
    if not isinstance(found.get("schema"), dict):
        raise wrong("output_config.format.schema", "must be an object")
    schema = {"name": "output", "schema": found["schema"], "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
