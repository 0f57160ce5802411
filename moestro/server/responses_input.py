"""The input of a response as chat messages. Owns: items, and how they make up turns.

A turn of the assistant is a row of items (reasoning, message, function calls); chat wants it as
one message.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from moestro.errors import InvalidRequest
from moestro.server.dialect import Fields, fields_of, one_of, string_of, wrong

ROLES = ("user", "assistant", "system", "developer")
INSTRUCTING = ("system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
SEALED = "moestro:"  # what our own `encrypted_content` begins with


def messages_of(
    given: str | Sequence[Any], instructions: str | None
) -> tuple[list[Fields], list[str]]:
    """Return chat messages, and the field that each one came from.

    Instructions and what follows them from system or developer are one message: most templates
    show only one. Raises `InvalidRequest` naming the item at fault.
    """
    turns = _Turns()
    if instructions:
        turns.add({"role": "system", "content": instructions}, "instructions")
    if isinstance(given, str):
        turns.add({"role": "user", "content": given}, "input")
    else:
        if not given:
            raise wrong("input", "must hold at least one item")
        for i, item in enumerate(given):
            _add(turns, item, f"input.{i}")
    turns.flush()
    return turns.messages, turns.origins


def seal(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`: base64, for clients that hand back only that."""
    return SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode("ascii")


class _Turns:
    """Messages as they come together. The assistant's open turn is kept apart until it ends."""

    def __init__(self) -> None:
        self.messages: list[Fields] = []
        self.origins: list[str] = []
        self.calls: dict[str, str] = {}  # id -> function
        self._open: Fields = {}
        self._at = ""

    def add(self, message: Fields, at: str) -> None:
        """Add a message that is not the assistant's."""
        self.flush()
        last = self.messages[-1] if len(self.messages) == 1 else None
        if last and last["role"] in INSTRUCTING and message["role"] in INSTRUCTING:
            last["content"] += "\n\n" + message["content"]
            return
        self.messages.append(message)
        self.origins.append(at)

    def assist(self, at: str, *, after: Sequence[str] = ()) -> Fields:
        """Return the open turn; a new one when one of the parts `after` is in it already."""
        if any(name in self._open for name in after):
            self.flush()
        if not self._open:
            self._open, self._at = {"role": "assistant"}, at
        return self._open

    def flush(self) -> None:
        """End the assistant's turn."""
        if self._open:
            self.messages.append({"content": None, **self._open})
            self.origins.append(self._at)
        self._open = {}


def _add(turns: _Turns, raw: Any, at: str) -> None:
    item = fields_of(raw, at)
    kind = item.get("type", "message")
    if kind == "message":
        _message(turns, item, at)
    elif kind == "reasoning":
        turn = turns.assist(at, after=("content", "tool_calls"))
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(item, at)
    elif kind == "function_call":
        _call(turns, item, at)
    elif kind == "function_call_output":
        _output(turns, item, at)
    elif kind == "item_reference":
        raise wrong(f"{at}.type", "'item_reference' is not supported: responses are not kept")
    else:
        raise wrong(f"{at}.type", f"{_named(kind)} is not supported in an input")


def _message(turns: _Turns, item: Fields, at: str) -> None:
    role = one_of(item.get("role"), f"{at}.role", ROLES)
    text = _text(item.get("content"), f"{at}.content")
    if role == "assistant":
        turns.assist(at, after=("content", "tool_calls"))["content"] = text
    else:
        turns.add({"role": role, "content": text}, at)


def _call(turns: _Turns, item: Fields, at: str) -> None:
    id, name = string_of(item, "call_id", at), string_of(item, "name", at)
    function = {"name": name, "arguments": string_of(item, "arguments", at)}
    calls = turns.assist(at).setdefault("tool_calls", [])
    calls.append({"id": id, "type": "function", "function": function})
    turns.calls[id] = name


def _output(turns: _Turns, item: Fields, at: str) -> None:
    id = string_of(item, "call_id", at)
    if id not in turns.calls:
        raise wrong(f"{at}.call_id", "must be that of a function_call before it in the input")
    text = _text(item.get("output"), f"{at}.output")
    message = {"role": "tool", "tool_call_id": id, "name": turns.calls[id], "content": text}
    turns.add(message, at)


def _reasoning(item: Fields, at: str) -> str:
    content = item.get("content")
    if content:
        return _text(content, f"{at}.content", {"reasoning_text": "text"})
    sealed = item.get("encrypted_content")
    if sealed is not None:
        return _unsealed(sealed, f"{at}.encrypted_content")
    return _text(item.get("summary") or "", f"{at}.summary", {"summary_text": "text"})


def _unsealed(sealed: Any, at: str) -> str:
    try:
        if isinstance(sealed, str) and sealed.startswith(SEALED):
            return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise wrong(at, "can only be what this server gave")


def _text(content: Any, at: str, kinds: dict[str, str] = TEXTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(at, "is required" if content is None else "must be a string or an array")
    return "".join(_part(part, f"{at}.{i}", kinds) for i, part in enumerate(content))


def _part(raw: Any, at: str, kinds: dict[str, str]) -> str:
    part = fields_of(raw, at)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequest(
            f"'{at}.type': {_named(kind)} is not supported, this model reads text.",
            param=f"{at}.type",
        )
    return string_of(part, kinds[kind], at)


def _named(kind: Any) -> str:
    plain = isinstance(kind, str) and kind.isidentifier() and len(kind) <= 64
    return f"'{kind}'" if plain else "this type"
