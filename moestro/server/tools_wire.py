"""Deltas as chat completions spell them. Owns: the JSON of one delta and of a whole message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moestro.server.tools_deltas import Arguments, Called, Delta, Said, Thought
from moestro.server.wire import dump, quote
from moestro.types import Finish


def delta_json(delta: Delta) -> str:
    """Return the `delta` object of a chunk."""
    if isinstance(delta, Said):
        return f'{{"content":{quote(delta.text)}}}'
    if isinstance(delta, Thought):
        return f'{{"reasoning_content":{quote(delta.text)}}}'
    if isinstance(delta, Called):
        call = {"index": delta.index, **_call(delta, "")}
    else:
        call = {"index": delta.index, "function": {"arguments": delta.text}}
    return dump({"tool_calls": [call]})


def message_json(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Return the `message` object. Content is null when there are only calls."""
    text = "".join(d.text for d in deltas if isinstance(d, Said))
    thought = "".join(d.text for d in deltas if isinstance(d, Thought))
    started = [d for d in deltas if isinstance(d, Called)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if started and not text else text,
        "refusal": None,
    }
    if thought:
        message["reasoning_content"] = thought
    if started:
        message["tool_calls"] = [_call(call, _arguments(deltas, call.index)) for call in started]
    return message


def finish_reason(finish: Finish, *, called: bool) -> str:
    """Return why a choice ended. `called`: see `Answer.ended_to_call`."""
    return "tool_calls" if called and finish is Finish.STOP else finish.value


def _call(call: Called, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(deltas: Sequence[Delta], index: int) -> str:
    return "".join(d.text for d in deltas if isinstance(d, Arguments) and d.index == index)
