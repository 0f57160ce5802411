"""Chat messages as clients send them, made into what templates expect.

Owns: roles, content parts, tool calls in a history. Does not own: the template itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from moestro.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = {"text": "text", "refusal": "refusal"}
OTHER_PARTS = frozenset(
    {"image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file"}
)

Message = dict[str, Any]


def normalise(messages: Sequence[Any], *, developer_role: bool) -> list[Message]:
    """Return messages whose content is a string (or None beside tool calls).

    `developer_role`: the template knows that role; else it becomes "system". Raises
    `InvalidRequest` naming the message at fault, never quoting it.
    """
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message.", param="messages")
    return [_message(m, f"messages.{i}", developer_role) for i, m in enumerate(messages)]


def _message(raw: Any, at: str, developer_role: bool) -> Message:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"'{at}' must be an object.", param=at)
    role = raw.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"'{at}.role' must be one of {', '.join(ROLES)}.", param=f"{at}.role")
    message = {key: value for key, value in raw.items() if value is not None}
    if role == "developer" and not developer_role:
        message["role"] = "system"
    calls = _tool_calls(message.pop("tool_calls", None), f"{at}.tool_calls")
    if calls:
        message["tool_calls"] = calls
    _both_reasoning_names(message, at)
    message["content"] = _content(raw, at, optional=bool(calls) or "reasoning" in message)
    return message


def _both_reasoning_names(message: Message, at: str) -> None:
    """Servers differ in what they call it, and so do templates: give both names."""
    for name in ("reasoning_content", "reasoning"):
        if name in message:
            if not isinstance(message[name], str):
                raise InvalidRequest(f"'{at}.{name}' must be a string.", param=f"{at}.{name}")
            message["reasoning_content"] = message["reasoning"] = message[name]
            return


def _content(raw: Message, at: str, *, optional: bool) -> str | None:
    content = raw.get("content")
    at = f"{at}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if raw["role"] == "assistant" and optional:
            return None
        raise InvalidRequest(f"'{at}' is required.", param=at)
    if not isinstance(content, list):
        raise InvalidRequest(f"'{at}' must be a string or an array of parts.", param=at)
    if not content:
        raise InvalidRequest(f"'{at}' must hold at least one part.", param=at)
    return "".join(_part(part, f"{at}.{i}") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"'{at}' must be an object with a type.", param=at)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        named = f"'{kind}'" if isinstance(kind, str) and kind in OTHER_PARTS else "this type"
        raise InvalidRequest(
            f"'{at}.type': parts of {named} are not supported, this model reads text.",
            param=f"{at}.type",
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        field = f"{at}.{TEXT_PARTS[kind]}"
        raise InvalidRequest(f"'{field}' must be a string.", param=field)
    return text


def _tool_calls(calls: Any, at: str) -> list[Message]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidRequest(f"'{at}' must be an array.", param=at)
    return [_tool_call(call, f"{at}.{i}") for i, call in enumerate(calls)]


def _tool_call(call: Any, at: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"'{at}.function' must have a name.", param=f"{at}.function")
    arguments = function.get("arguments")
    return {**call, "function": {**function, "arguments": _arguments(arguments)}}


def _arguments(arguments: Any) -> Any:
    """Templates write arguments as JSON themselves, so they want the object, not its text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError, ValueError):
        return arguments


def with_thinking(message: Message) -> Message:
    """Return the message with its reasoning under the name that harmony's template knows.

    That template refuses reasoning beside content in a message with calls: the content stays.
    """
    if "reasoning" not in message or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": message["reasoning"]}


def in_texts(message: Message) -> Message:
    """Return the message with the arguments of its calls as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_in_text(call) for call in calls]}


def _in_text(call: Message) -> Message:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
