"""One sequence's tokens made into text. Owns: hold-back, the cut at a stop string, what is counted.

Does not own: how the text is sent. Rules, the same for streamed and whole replies:

- An EOS or stop token counts as generated and is listed in the ids, but has no text and no
  log-probability (unless `include` asks for stops to be shown).
- The tokens that spell a stop string count, are listed and have log-probabilities; what follows
  the token that completes it was never generated as far as the client can tell.
- With details (log-probabilities or ids) a piece ends at a token border, so that text and tokens
  of one piece describe each other. Without, only what may become a stop string is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moestro.server.detokenize import Detokenizer
from moestro.server.sampling import StopRules
from moestro.server.stops import StopMatcher
from moestro.types import Finish, TokenEvent, TokenLogprobs


@dataclass(slots=True)
class Piece:
    """What can be sent of one choice. `offsets`: where each logprob's text starts in the whole."""

    text: str
    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    offsets: Sequence[int] = ()
    finish: Finish | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class _Waiting:
    """A token that is not sent yet. `end` is where its text ends, None while that is not known."""

    id: int
    logprob: TokenLogprobs | None
    start: int
    end: int | None


class ChoiceText:
    """The text of one sequence as it grows."""

    def __init__(self, detokenizer: Detokenizer, stops: StopRules, *, detailed: bool) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops.strings) if stops.strings else None
        self._stops = stops
        self._detailed = detailed
        self._tail = ""  # decoded, not sent
        self._length = 0  # characters decoded so far, sent ones included
        self._waiting: deque[_Waiting] = deque()
        self.completion_tokens = 0
        self.finish: Finish | None = None
        self.stop_reason: str | int | None = None

    def push(self, event: TokenEvent) -> bool:
        """Take one event in. True when a stop string ended it and the engine must be told."""
        if self.finish is not None:
            return False
        ids = event.token_ids
        closing = len(ids) - 1 if event.finish is Finish.STOP else -1
        if self._matcher is None and not self._detailed:
            self._push_plain(ids, closing)
        else:
            for i, token in enumerate(ids):
                logprob = event.logprobs[i] if event.logprobs else None
                if self._token(token, logprob, i == closing):
                    return event.finish is None
        if event.finish is not None:
            self._close(event)
        return False

    def take(self) -> Piece:
        """Return everything that can be sent now. After the end it returns the rest, once."""
        if self.finish is None and self._matcher is None and not self._detailed:
            text, self._tail = self._tail, ""
            return Piece(text)
        sent = self._length - len(self._tail)
        until = self._boundary()
        text, self._tail = self._tail[: until - sent], self._tail[until - sent :]
        piece = Piece(text, finish=self.finish, stop_reason=self.stop_reason)
        if self._detailed:
            self._take_tokens(piece, until)
        return piece

    def _push_plain(self, ids: Sequence[int], closing: int) -> None:
        self.completion_tokens += len(ids)
        shown = ids[:closing] if closing >= 0 and not self._stops.include else ids
        text = self._detokenizer.push_many(shown)
        self._tail += text
        self._length += len(text)

    def _token(self, token: int, logprob: TokenLogprobs | None, closing: bool) -> bool:
        """Take one token in. True when it completed a stop string."""
        self.completion_tokens += 1
        start = self._length
        if closing and not self._stops.include:
            if self._detailed:
                self._waiting.append(_Waiting(token, None, start, start))
            return False
        text = self._detokenizer.push(token)
        if self._detailed:
            self._waiting.append(_Waiting(token, logprob, start, None))
        self._append(text)
        return self.finish is not None

    def _append(self, text: str) -> None:
        """Add decoded text; a completed stop string cuts it and ends the sequence."""
        self._tail += text
        self._length += len(text)
        if self._detailed and not self._detokenizer.pending:
            self._settle()
        if self._matcher is None:
            return
        armed = self.completion_tokens >= self._stops.min_tokens
        match = self._matcher.feed(text, armed=armed)
        if match is not None:
            self._cut(match.end if self._stops.include else match.start)
            self.finish, self.stop_reason = Finish.STOP, match.stop

    def _cut(self, at: int) -> None:
        excess = self._length - at
        self._tail = self._tail[: len(self._tail) - excess]
        self._length = at
        self._settle()

    def _settle(self) -> None:
        """Every character is complete: the tokens that waited for that end here."""
        for waiting in reversed(self._waiting):
            if waiting.end is not None:
                return
            waiting.end = self._length

    def _close(self, event: TokenEvent) -> None:
        self._append(self._detokenizer.flush())
        if self.finish is None:
            self.finish, self.stop_reason = event.finish, event.stop_token

    def _boundary(self) -> int:
        """Return up to which character text can be sent."""
        if self.finish is not None:
            return self._length
        sent = self._length - len(self._tail)
        free = self._length - (self._matcher.held if self._matcher is not None else 0)
        if not self._detailed:
            return free
        until = sent
        for waiting in self._waiting:
            if waiting.end is None or waiting.end > free:
                break
            until = waiting.end
        return until

    def _take_tokens(self, piece: Piece, until: int) -> None:
        taken: list[_Waiting] = []
        while self._waiting:
            end = self._waiting[0].end
            if self.finish is None and (end is None or end > until):
                break
            taken.append(self._waiting.popleft())
        scored = [w for w in taken if w.logprob is not None]
        piece.ids = [w.id for w in taken]
        piece.logprobs = [w.logprob for w in scored if w.logprob is not None]
        piece.offsets = [min(w.start, self._length) for w in scored]
