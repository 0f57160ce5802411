"""JSON handed on while it is written. Owns: where an object ends, and what is escaped on the way.

An object is followed by its brackets and strings alone: what stands between them is the model's
business, as it is in any API that streams arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from moestro.server.tools_deltas import Broken, Cut, Sink, call_of, loads
from moestro.server.tools_reader import (
    CLOSING,
    OUTSIDE,
    SPACE,
    Reader,
    Steps,
    literal,
    need,
    peek,
    prose,
    spaces,
    string,
    value,
)

Emit = Callable[[str], None]
SPECIAL = re.compile(r'["\\\x00-\x1f]')


def json_call(r: Reader, out: Sink, ends: Sequence[str]) -> Steps[None]:
    """Tell a call written as `{"name": .., "arguments": {..}}`, in whatever order.

    Arguments that stand behind the name are told while they are written. Raises `Broken` or `Cut`
    when nothing was told. For `ends` see `arguments`.
    """
    start = r.pos
    name = yield from _head(r)
    if name is None:
        r.pos = start
        found = yield from value(r)
        if not isinstance(found, dict):
            raise Broken
        out.call(call_of(found.get("name"), found.get("arguments", found.get("parameters"))))
        return
    yield from arguments(r, out, name, ends)
    yield from copied(r, _drop, ["}"])


def arguments(r: Reader, out: Sink, name: str, ends: Sequence[str]) -> Steps[None]:
    """Tell a call whose arguments come next, while they are written.

    Raises `Broken` or `Cut` when nothing was told. Arguments that break off are told as they are,
    up to one of `ends`, which is not read.
    """
    if not name:
        raise Broken
    if not (yield from object_comes(r)):
        out.call(call_of(name, (yield from value(r))))
        return
    out.begin(name)
    if (yield from copied(r, out.more, [])) or (yield from _broken(r, out.more, ends)):
        out.end()


def object_comes(r: Reader) -> Steps[bool]:
    """Whether a JSON object comes. Raises `Broken` for one that has no key, `Cut` at the end."""
    yield from spaces(r)
    if (yield from peek(r)) != "{":
        return False
    at = r.pos + 1
    while True:
        while at < len(r.text) and r.text[at] in SPACE:
            at += 1
        if at < len(r.text):
            break
        yield from need(r)
    if r.text[at] not in '"}':
        raise Broken
    return True


def copied(r: Reader, emit: Emit, open: list[str]) -> Steps[bool]:
    """Hand on JSON up to the end of the object that comes; `open` are brackets to close already.

    False where it breaks off: at the end of the answer, at a bracket that fits none, at a "<"
    outside a string. What does not fit is not read.
    """
    try:
        while True:
            char = yield from _outside(r, emit)
            if char in CLOSING:
                open.append(CLOSING[char])
            elif char != '"' and (not open or char != open.pop()):
                return False
            r.pos += 1
            emit(char)
            if char == '"':
                yield from _string(r, emit)
            if not open:
                return True
    except Cut:
        return False


def _outside(r: Reader, emit: Emit) -> Steps[str]:
    """Hand on what stands outside strings and return the next bracket, quote or marker, unread."""
    while (found := OUTSIDE.search(r.text, r.pos)) is None:
        _pass(r, emit, len(r.text))
        yield from need(r)
    _pass(r, emit, found.start())
    return found[0]


def _string(r: Reader, emit: Emit) -> Steps[None]:
    """Hand on the rest of a string. Control characters, which JSON forbids, are escaped."""
    while True:
        while (found := SPECIAL.search(r.text, r.pos)) is None:
            _pass(r, emit, len(r.text))
            yield from need(r)
        _pass(r, emit, found.start())
        r.pos = found.end()
        if found[0] == '"':
            emit('"')
            return
        if found[0] == "\\":
            pair = "\\" + (yield from peek(r))
            r.pos += 1
            emit(pair)
        else:
            emit(json.dumps(found[0])[1:-1])


def _pass(r: Reader, emit: Emit, end: int) -> None:
    emit(r.text[r.pos : end])
    r.pos = end


def _broken(r: Reader, emit: Emit, ends: Sequence[str]) -> Steps[bool]:
    """Hand on what is no JSON up to one of `ends`; False at the end of the answer."""
    found = yield from prose(r, emit, ends, "")
    if found is None:
        emit(r.rest())
        return False
    r.pos -= len(found.word)
    return True


def _drop(_text: str) -> None:
    pass


def _head(r: Reader) -> Steps[str | None]:
    """Read `{"name": "f", "arguments": ` before an object; None when something else comes."""
    for word in ("{", '"name"', ":"):
        yield from spaces(r)
        if not (yield from literal(r, word)):
            return None
    yield from spaces(r)
    start = r.pos
    if not (yield from literal(r, '"')):
        return None
    try:
        yield from string(r)
        name = loads(r.text[start : r.pos])
        yield from spaces(r)
        if not (yield from literal(r, ",")):
            return None
        yield from spaces(r)
        if not ((yield from literal(r, '"arguments"')) or (yield from literal(r, '"parameters"'))):
            return None
        yield from spaces(r)
        if not (yield from literal(r, ":")):
            return None
        yield from spaces(r)
        return name if name and (yield from peek(r)) == "{" else None
    except (Broken, Cut):
        return None
