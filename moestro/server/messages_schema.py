"""The wire models of POST /v1/messages and its count_tokens, and the fields refused by name."""

from __future__ import annotations

from typing import Any

from moestro.server.refusals import REFUSED_CHAT, Refused
from moestro.server.schema import Bool, Float, Int, Str, Wire

SERVERS = "nothing but the model runs here"


class CountTokensRequest(Wire):
    """POST /v1/messages/count_tokens: all that becomes part of the prompt."""

    model: Str | None = None
    messages: list[Any]
    system: Str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[Str, Any] | None = None
    thinking: dict[Str, Any] | None = None
    output_config: dict[Str, Any] | None = None
    cache_control: dict[Str, Any] | None = None  # prompts that start alike share their cache anyway


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Int
    stop_sequences: list[Str] | None = None
    stream: Bool | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    metadata: dict[Str, Any] | None = None  # who asks, for services around a model


REFUSED_MESSAGES: Refused = {
    **REFUSED_CHAT,
    "container": ((), SERVERS),
    "mcp_servers": (([],), SERVERS),
    "context_management": (({"edits": []},), "shorten the conversation before sending it"),
    "diagnostics": ((), "see /metrics"),
    "speed": (("standard",), "there is one speed"),
    "inference_geo": ((), "there is one place"),
    "stop": ((), "use stop_sequences"),
    "max_completion_tokens": ((), "use max_tokens"),
    "response_format": ((), "use output_config.format"),
    "reasoning_effort": ((), "use output_config.effort"),
    "n": ((1,), "a message is one answer"),
}
