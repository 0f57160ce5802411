"""Reading text that arrives in pieces. Owns: waiting for more, markers, JSON values, hold-back.

A parser is a script: a generator that reads as if all the text were there and yields whenever it
is not. What it decides depends on the text alone, so every chunking gives the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moestro.server.tools_deltas import Broken, Cut, Delta, Sink, loads

T = TypeVar("T")
Steps = Generator[None, None, T]

SPACE = " \t\r\n"
MOST_SPACE = 64  # characters of white space that may wait for a marker behind them
OUTSIDE = re.compile(r'["{}\[\]<]')  # no JSON has < outside a string: a marker came too early
INSIDE = re.compile(r'["\\]')
CLOSING = {"{": "}", "[": "]"}


class Reader:
    """The text so far and how far it was read."""

    __slots__ = ("ended", "pos", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False

    def rest(self) -> str:
        """Return everything that was not read, and forget it."""
        rest = self.text[self.pos :]
        self.text, self.pos = "", 0
        return rest

    def forget(self) -> None:
        """Let go of what was read. Positions taken before are void."""
        self.text, self.pos = self.text[self.pos :], 0


Script = Callable[[Reader, Sink], Steps[None]]


class Parser:
    """Runs a script over one answer. After `finish` it is spent."""

    def __init__(self, script: Script, sink: Sink | None = None) -> None:
        self._reader = Reader()
        self._sink = sink or Sink()
        self._steps: Steps[None] = script(self._reader, self._sink)
        next(self._steps, None)

    @property
    def writing(self) -> bool:
        """Whether the last call is incomplete."""
        return self._sink.writing

    def feed(self, text: str) -> list[Delta]:
        """Return what can be told from the text so far and was not returned before."""
        self._reader.text += text
        next(self._steps, None)
        return self._sink.take()

    def finish(self) -> list[Delta]:
        """Return what is left: the answer ends here."""
        self._reader.ended = True
        next(self._steps, None)
        return self._sink.take()


def more(r: Reader) -> Steps[bool]:
    """Wait for more text; False when there is none."""
    if r.ended:
        return False
    yield
    return True


def need(r: Reader) -> Steps[None]:
    """Wait for more text. Raises `Cut` when there is none."""
    if not (yield from more(r)):
        raise Cut


def spaces(r: Reader, most: int = MOST_SPACE, which: str = SPACE) -> Steps[None]:
    """Read white space, at most so much of it."""
    end = r.pos + most
    while True:
        while r.pos < min(len(r.text), end) and r.text[r.pos] in which:
            r.pos += 1
        if r.pos < len(r.text) or r.pos == end or not (yield from more(r)):
            return


def literal(r: Reader, word: str) -> Steps[bool]:
    """Read exactly `word`; False, and nothing read, when something else comes."""
    while len(r.text) - r.pos < len(word) and word.startswith(r.text[r.pos :]):
        if not (yield from more(r)):
            return False
    if not r.text.startswith(word, r.pos):
        return False
    r.pos += len(word)
    return True


def close(r: Reader, word: str) -> Steps[None]:
    """Read white space and `word`, if that is what comes."""
    mark = r.pos
    yield from spaces(r)
    if not (yield from literal(r, word)):
        r.pos = mark


def peek(r: Reader) -> Steps[str]:
    """Return the next character without reading it. Raises `Cut` at the end."""
    while r.pos >= len(r.text):
        yield from need(r)
    return r.text[r.pos]


def until(r: Reader, word: str, most: int | None = None) -> Steps[str]:
    """Return the text before `word` and read both. Raises `Cut`, or `Broken` past `most`."""
    start = search = r.pos
    while True:
        at = r.text.find(word, search)
        seen = at if at >= 0 else len(r.text) - len(word) + 1
        if most is not None and seen - start > most:
            raise Broken
        if at >= 0:
            r.pos = at + len(word)
            return r.text[start:at]
        search = max(start, seen)
        yield from need(r)


def value(r: Reader) -> Steps[Any]:
    """Return the JSON object or array that comes. Raises `Broken` when there is none."""
    start = r.pos
    if (yield from peek(r)) not in CLOSING:
        raise Broken
    open: list[str] = []
    while True:
        char = yield from _next(r, OUTSIDE)
        if char in CLOSING:
            open.append(CLOSING[char])
        elif char == '"':
            yield from string(r)
        elif char != open.pop():
            raise Broken
        if not open:
            return loads(r.text[start : r.pos])


def _next(r: Reader, pattern: re.Pattern[str]) -> Steps[str]:
    while (found := pattern.search(r.text, r.pos)) is None:
        r.pos = len(r.text)
        yield from need(r)
    r.pos = found.end()
    return found[0]


def string(r: Reader) -> Steps[None]:
    """Read the rest of a JSON string, behind its first quote."""
    while (yield from _next(r, INSIDE)) == "\\":
        yield from peek(r)
        r.pos += 1


@dataclass(frozen=True, slots=True)
class Found:
    """A marker in the reader's text. `start` is where the white space before it begins."""

    start: int
    end: int
    word: str


def prose(
    r: Reader, emit: Callable[[str], None], markers: Sequence[str], which: str = SPACE
) -> Steps[Found | None]:
    """Hand text to `emit` up to a marker, which is read and returned; None at the end.

    White space before a marker (`which` of it) is not handed on, nor at the end: it stays.
    """
    pattern = re.compile("|".join(map(re.escape, markers)))
    while True:
        r.forget()
        found = pattern.search(r.text)
        safe = len(r.text) - _started(r.text, markers) if found is None else found.start()
        free = len(r.text[:safe].rstrip(which))
        free = max(free, safe - MOST_SPACE)
        emit(r.text[:free])
        r.pos = free
        if found is not None:
            r.pos = found.end()
            return Found(free, found.end(), found[0])
        if not (yield from more(r)):
            return None


def _started(text: str, markers: Sequence[str]) -> int:
    """Return how much of the end of `text` may become a marker."""
    tail = text[-(max(map(len, markers)) - 1) :]
    firsts = {marker[0] for marker in markers}
    for i, char in enumerate(tail):
        if char in firsts and any(marker.startswith(tail[i:]) for marker in markers):
            return len(tail) - i
    return 0


def through(r: Reader, emit: Callable[[str], None]) -> Steps[None]:
    """Hand on all the rest as it comes."""
    while True:
        emit(r.rest())
        if not (yield from more(r)):
            return
