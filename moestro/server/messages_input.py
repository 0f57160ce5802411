"""Messages of the Messages API as chat messages. Owns: content blocks and the system prompt.

One message of a user may be several of chat: each tool result is one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moestro.server.dialect import Fields, fields_of, one_of, string_of, wrong

ROLES = ("user", "assistant", "system")


def messages_of(
    given: Sequence[Any], system: str | list[Any] | None
) -> tuple[list[Fields], list[str]]:
    """Return chat messages, and the field that each one came from.

    Raises `InvalidRequest` naming the block at fault.
    """
    if not given:
        raise wrong("messages", "must hold at least one message")
    history = _History()
    if system:
        history.system(_texts(system, "system"), "system")
    for i, raw in enumerate(given):
        at = f"messages.{i}"
        message = fields_of(raw, at)
        role = one_of(message.get("role"), f"{at}.role", ROLES)
        content = message.get("content")
        if role == "system":
            history.system(_texts(content, f"{at}.content"), at)
        elif role == "user":
            _user(history, content, at)
        else:
            _assistant(history, content, at)
    return history.messages, history.origins


class _History:
    """Chat messages as they come together."""

    def __init__(self) -> None:
        self.messages: list[Fields] = []
        self.origins: list[str] = []
        self.calls: dict[str, str] = {}  # id -> function

    def add(self, message: Fields, at: str) -> None:
        """Add a message."""
        self.messages.append(message)
        self.origins.append(at)

    def system(self, text: str, at: str) -> None:
        """Add to the system prompt, or later on a message of the system."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n" + text
        else:
            self.add({"role": "system", "content": text}, at)


def _user(history: _History, content: Any, at: str) -> None:
    if isinstance(content, str):
        history.add({"role": "user", "content": content}, at)
        return
    blocks = _blocks(content, f"{at}.content")
    if not blocks:
        raise wrong(f"{at}.content", "must hold at least one block")
    texts: list[str] = []
    for block, where in blocks:
        if block["type"] == "tool_result":
            _said(history, texts, at)
            texts = []
            _result(history, block, where)
        else:
            texts.append(_text(block, where))
    _said(history, texts, at)


def _said(history: _History, texts: list[str], at: str) -> None:
    if texts:
        history.add({"role": "user", "content": "\n".join(texts)}, at)


def _result(history: _History, block: Fields, at: str) -> None:
    id = string_of(block, "tool_use_id", at)
    if id not in history.calls:
        raise wrong(f"{at}.tool_use_id", "must be the id of a tool_use before it")
    text = _texts(block.get("content", ""), f"{at}.content")
    failed = block.get("is_error", False)
    if not isinstance(failed, bool):
        raise wrong(f"{at}.is_error", "must be true or false")
    message = {
        "role": "tool",
        "tool_call_id": id,
        "name": history.calls[id],
        "content": f"Error: {text}" if failed else text,
    }
    history.add(message, at)


def _assistant(history: _History, content: Any, at: str) -> None:
    if isinstance(content, str):
        history.add({"role": "assistant", "content": content}, at)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Fields] = []
    for block, where in _blocks(content, f"{at}.content"):
        if block["type"] == "tool_use":
            calls.append(_call(history, block, where))
        elif block["type"] == "thinking":
            thoughts.append(string_of(block, "thinking", where))
        else:
            texts.append(_text(block, where))
    message: Fields = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    history.add(message, at)


def _call(history: _History, block: Fields, at: str) -> Fields:
    id, name = string_of(block, "id", at), string_of(block, "name", at)
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise wrong(f"{at}.input", "must be an object")
    history.calls[id] = name
    return {"id": id, "type": "function", "function": {"name": name, "arguments": given}}


def _texts(content: Any, at: str) -> str:
    """Return text given as a string or as text blocks, one a paragraph."""
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, where) for block, where in _blocks(content, at))


def _blocks(content: Any, at: str) -> list[tuple[Fields, str]]:
    """Return the blocks with their places; each has a type that is a string."""
    if not isinstance(content, list):
        raise wrong(at, "is required" if content is None else "must be a string or an array")
    found = []
    for i, raw in enumerate(content):
        block = fields_of(raw, f"{at}.{i}")
        string_of(block, "type", f"{at}.{i}")
        found.append((block, f"{at}.{i}"))
    return found


def _text(block: Fields, at: str) -> str:
    kind = block["type"]
    if kind != "text":
        named = f"'{kind}'" if kind.isidentifier() and len(kind) <= 64 else "this type"
        raise wrong(f"{at}.type", f"is not supported here: {named}, this model reads text")
    return string_of(block, "text", at)
