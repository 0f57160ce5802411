"""Finding stop strings in text that arrives in pieces. Owns: the match and what must be held back.

Works on characters, so it does not matter how a stop string was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string, as character positions in all text fed so far."""

    stop: str
    start: int
    end: int


def borders(pattern: str) -> list[int]:
    """Return for each prefix length the longest proper prefix that is also its suffix.

    The failure function of Knuth, Morris and Pratt (1977); entry 0 is 0.
    """
    table = [0] * (len(pattern) + 1)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length]
        if pattern[position] == pattern[length]:
            length += 1
        table[position + 1] = length
    return table


class _Pattern:
    """One stop string and how much of it the text so far ends with."""

    __slots__ = ("borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = borders(text)
        self.matched = 0  # always a proper prefix: a full match falls back at once

    def feed(self, piece: str) -> list[int]:
        """Advance over `piece`; return where in it a full match ends (offset past the last one)."""
        ends: list[int] = []
        text, table, matched = self.text, self.borders, self.matched
        position, size, whole = 0, len(piece), len(self.text)
        while position < size:
            if matched == 0:
                position = piece.find(text[0], position)
                if position < 0:
                    break
            char = piece[position]
            while matched and char != text[matched]:
                matched = table[matched]
            if char == text[matched]:
                matched += 1
            position += 1
            if matched == whole:
                ends.append(position)
                matched = table[matched]
        self.matched = matched
        return ends


class StopMatcher:
    """All stop strings of one sequence."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._fed = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still become a stop string."""
        return max((p.matched for p in self._patterns), default=0)

    def feed(self, piece: str, *, armed: bool = True) -> Match | None:
        """Advance over `piece`; return the match that ends first, ties in the order given.

        While not `armed`, completed matches pass as ordinary text.
        """
        found: Match | None = None
        for pattern in self._patterns:
            ends = pattern.feed(piece)
            if ends and armed:
                end = self._fed + ends[0]
                if found is None or end < found.end:
                    found = Match(pattern.text, end - len(pattern.text), end)
        self._fed += len(piece)
        return found
