"""What a parsed answer is made of. Owns: the four kinds of delta, call ids, and how calls are made.

Does not own: how deltas are found in text (`tools_reader` and the families) or spelled
(`chat_wire`).
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """The start of a call. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments; all fragments of one call together are what the model wrote.

    That is a JSON object, unless the answer was cut off or the model wrote something else.
    """

    index: int
    text: str


Delta = Said | Thought | Called | Arguments


class Broken(Exception):
    """What follows a marker is no call: it is text like any other."""


class Cut(Broken):
    """The answer ended inside a call."""


def openai_id() -> str:
    """Return an id as most clients know them."""
    return "call_" + secrets.token_hex(12)


def mistral_id() -> str:
    """Return an id of the only form that Mistral's templates take back: nine letters or digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


def call_of(name: Any, arguments: Any) -> Call:
    """Return a call. `arguments` is an object, or its JSON text. Raises `Broken` when it is not."""
    if isinstance(arguments, str):
        arguments = loads(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Broken
    return Call(name, dumped(arguments))


def loads(text: str) -> Any:
    """Return the JSON value; line breaks inside strings are let pass. Raises `Broken`."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Broken from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def dumped(value: Any) -> str:
    """Return the JSON text of a value. Raises `Broken` for a number that JSON cannot write."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: only an escape can carry it
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):  # 1e999
        raise Broken from None
    return text


class Sink:
    """Collects the deltas of one answer, neighbours of one kind joined."""

    def __init__(self, new_id: Callable[[], str] = openai_id) -> None:
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self.calls = 0
        self.fresh = True  # nothing was said since the last call
        self.writing = False  # the last call's arguments are not complete

    def said(self, text: str) -> None:
        """Add text for the user."""
        if text:
            self.fresh = False
            self._text(Said, text)

    def thought(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._text(Thought, text)

    def _text(self, kind: type[Said] | type[Thought], text: str) -> None:
        if self._deltas and isinstance(last := self._deltas[-1], kind):
            self._deltas[-1] = kind(last.text + text)
        else:
            self._deltas.append(kind(text))

    def begin(self, name: str) -> None:
        """Begin a call. Its arguments follow while they are written."""
        self._deltas.append(Called(self.calls, self._new_id(), name))
        self.calls += 1
        self.writing = True

    def more(self, text: str) -> None:
        """Add to the arguments of the call that was begun."""
        if not text:
            return
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, Arguments):
            self._deltas[-1] = Arguments(last.index, last.text + text)
        else:
            self._deltas.append(Arguments(self.calls - 1, text))

    def end(self) -> None:
        """End the call that was begun."""
        self.writing = False
        self.fresh = True

    def call(self, call: Call) -> None:
        """Add a whole call."""
        self.begin(call.name)
        self.more(call.arguments)
        self.end()

    def take(self) -> list[Delta]:
        """Return what was added since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas
