"""Log-probabilities as the two endpoints spell them. Owns: token text, bytes and missing values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moestro.server.tokenizer import Tokenizer
from moestro.types import TokenLogprobs

LOWEST = -9999.0  # JSON has no -Infinity


def finite(value: float) -> float:
    """Return a number that JSON can carry."""
    return value if math.isfinite(value) and value > LOWEST else LOWEST


@dataclass(frozen=True, slots=True)
class Speller:
    """Spells tokens. `as_ids`: "token_id:<n>" instead of text."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def chat(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text (U+FFFD where it is half a character) and its true bytes."""
        raw = self.tokenizer.bytes_of(token)
        text = f"token_id:{token}" if self.as_ids else raw.decode("utf-8", "replace")
        return text, list(raw)

    def plain(self, token: int) -> str:
        """Return a token's text; half characters keep their bytes apart as OpenAI spells them."""
        if self.as_ids:
            return f"token_id:{token}"
        raw = self.tokenizer.bytes_of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(speller: Speller, logprobs: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice, with `top` alternatives per token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = speller.chat(token)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    content = [
        {
            **entry(lp.token_id, lp.logprob),
            "top_logprobs": [entry(token, value) for token, value in lp.top[:top]],
        }
        for lp in logprobs
    ]
    return {"content": content, "refusal": None}


@dataclass(slots=True)
class PlainLogprobs:
    """The `logprobs` object of a completions choice, as it grows."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @staticmethod
    def empty() -> PlainLogprobs:
        """Return one without tokens."""
        return PlainLogprobs([], [], [], [])

    def add(
        self, speller: Speller, logprobs: Iterable[TokenLogprobs], offsets: Iterable[int], top: int
    ) -> None:
        """Append generated tokens; `offsets` are where each begins in the choice's text."""
        for lp, offset in zip(logprobs, offsets, strict=True):
            self.tokens.append(speller.plain(lp.token_id))
            self.token_logprobs.append(finite(lp.logprob))
            self.top_logprobs.append(_top(speller, lp, top))
            self.text_offset.append(offset)

    def add_prompt(
        self,
        speller: Speller,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Iterable[int],
        top: int,
    ) -> None:
        """Append prompt tokens; the first has nothing before it, so no log-probability."""
        for token, lp, offset in zip(ids, logprobs, offsets, strict=True):
            self.tokens.append(speller.plain(token))
            self.token_logprobs.append(None if lp is None else finite(lp.logprob))
            self.top_logprobs.append(None if lp is None else _top(speller, lp, top))
            self.text_offset.append(offset)

    def as_json(self) -> dict[str, Any]:
        """Return the wire form."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def _top(speller: Speller, lp: TokenLogprobs, top: int) -> dict[str, float]:
    """Two ids can spell the same text; the likelier one stays."""
    entries = {speller.plain(lp.token_id): finite(lp.logprob)}
    for token, logprob in lp.top[:top]:
        text = speller.plain(token)
        entries[text] = max(entries.get(text, LOWEST), finite(logprob))
    return entries


def offsets_of(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool) -> list[int]:
    """Return where the text of each id begins in the text of all of them."""
    detokenizer = tokenizer.detokenizer(skip_special=skip_special)
    offsets = []
    length = 0
    for token in ids:
        offsets.append(length)
        length += len(detokenizer.push(token))
    return offsets
