"""How many tokens of an answer were reasoning. Owns: finding that in tokens, without their text.

Counted is what follows the opening marker, up to and including the token that completes the end
marker: whole and streamed replies agree, however tokens come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moestro.server.reasoning import Marks
from moestro.server.tools_harmony import CHANNEL, MARKERS, MESSAGE

BytesOf = Callable[[int], bytes]


class ReasoningCounter(Protocol):
    """Counts for one sequence."""

    count: int

    def push(self, ids: Sequence[int]) -> None:
        """Take tokens in."""
        ...


class MarkedReasoning:
    """Reasoning between two markers at the start of an answer."""

    def __init__(self, marks: Marks, bytes_of: BytesOf, *, opened: bool) -> None:
        self._open, self._close = marks.open.encode(), marks.close.encode()
        self._bytes_of = bytes_of
        self._seen = b""  # what may become a marker
        self._inside = opened
        self._over = False
        self.count = 0

    def push(self, ids: Sequence[int]) -> None:
        """Take tokens in."""
        for token in ids:
            if self._over:
                return
            self._seen += self._bytes_of(token)
            if self._inside:
                self.count += 1
                self._over = self._close in self._seen
                self._seen = self._seen[-len(self._close) :]
            else:
                self._begin()

    def _begin(self) -> None:
        begun = self._seen.lstrip()
        if begun.startswith(self._open):
            self._inside, self._seen = True, begun[len(self._open) :]
        else:
            self._over = not self._open.startswith(begun)


class HarmonyReasoning:
    """Reasoning in the analysis channel. Markers are tokens of their own, as the model has them."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self._header: bytes | None = None  # None outside a header
        self._inside = False
        self.count = 0

    def push(self, ids: Sequence[int]) -> None:
        """Take tokens in."""
        for token in ids:
            self.count += self._inside
            text = self._bytes_of(token)
            if text in HARMONY_MARKERS:
                self._marker(text)
            elif self._header is not None:
                self._header += text

    def _marker(self, text: bytes) -> None:
        if text == MESSAGE.encode():
            self._inside = self._header is not None and self._header.strip() == b"analysis"
            self._header = None
        else:
            self._inside = False
            self._header = b"" if text == CHANNEL.encode() else None


HARMONY_MARKERS = frozenset(marker.encode() for marker in MARKERS)
