"""One answer as a row of blocks. Owns: where reasoning, text and calls begin and end.

Responses and Messages both tell an answer in this form; how a block is spelled is theirs
(`responses_wire`, `messages_wire`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from moestro.server.answer import AnswerFormat
from moestro.server.call import Call
from moestro.server.choice import Piece
from moestro.server.tools_deltas import Called, Delta, Said, Thought
from moestro.types import Finish, TokenLogprobs

Kind = Literal["thought", "text", "call"]


@dataclass(slots=True)
class Block:
    """A stretch of one kind. `call`: what is called; the text is then its arguments."""

    index: int
    kind: Kind
    call: Called | None = None
    cut: bool = False  # the answer ended inside it
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins; it is empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """More of the block's text, with the log-probabilities of its tokens when asked for."""

    block: Block
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """The block has its end."""

    block: Block


Step = Opened | Grown | Closed


class Transcript:
    """The answer of a call that has one choice, as it grows."""

    def __init__(self, call: Call) -> None:
        self._answer = (call.output.format or AnswerFormat()).start()
        self.blocks: list[Block] = []
        self.finish: Finish | None = None
        self.stop_reason: str | int | None = None

    @property
    def called(self) -> bool:
        """Whether there are calls for the client to make: the answer ended inside none."""
        return any(block.call is not None for block in self.blocks) and not self.blocks[-1].cut

    def add(self, piece: Piece) -> list[Step]:
        """Return what a piece brings, in order. The last piece closes what is open."""
        deltas = self._answer.feed(piece.text)
        if piece.finish is not None:
            deltas += self._answer.finish()
        steps = self._steps(deltas, tuple(piece.logprobs))
        if piece.finish is not None:
            steps += self._end(piece)
        return steps

    def _steps(self, deltas: Iterable[Delta], logprobs: tuple[TokenLogprobs, ...]) -> list[Step]:
        steps: list[Step] = []
        for delta in deltas:
            kind = _kind(delta)
            if isinstance(delta, Called):
                steps += self._open("call", delta)
                continue
            if not self.blocks or self.blocks[-1].kind != kind:
                steps += self._open(kind)
            steps.append(self._grow(delta.text, logprobs))
            logprobs = ()
        return steps

    def _open(self, kind: Kind, call: Called | None = None) -> list[Step]:
        steps: list[Step] = [Closed(self.blocks[-1])] if self.blocks else []
        self.blocks.append(Block(len(self.blocks), kind, call))
        return [*steps, Opened(self.blocks[-1])]

    def _grow(self, text: str, logprobs: tuple[TokenLogprobs, ...]) -> Step:
        block = self.blocks[-1]
        block.parts.append(text)
        block.logprobs += logprobs
        return Grown(block, text, logprobs)

    def _end(self, piece: Piece) -> list[Step]:
        """Close the last block; an answer of nothing is one empty text."""
        steps = [] if self.blocks else self._open("text")
        self.finish, self.stop_reason = piece.finish, piece.stop_reason
        last = self.blocks[-1]
        last.cut = self.finish is Finish.LENGTH
        if last.call is not None:
            last.cut = not _complete(last.text)
        return [*steps, Closed(last)]


def _kind(delta: Delta) -> Kind:
    if isinstance(delta, Thought):
        return "thought"
    return "text" if isinstance(delta, Said) else "call"


def _complete(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True
