"""Which tokens one sequence may sample: what its grammar allows, and what may end it.

Owns: how a grammar and the tokens that end a sequence (EOS, stop tokens, min_tokens) work together.
Everything follows from the tokens so far, so a sequence that is computed again, or goes on in
another engine, is constrained as before.

A token that ends the sequence is allowed where the grammar may end, or as its last token when the
grammar itself asks for it. While less than min_tokens are there it is allowed only when nothing
else is. A sequence without such tokens ends when its grammar is complete (`complete`).
"""

from __future__ import annotations

import numpy as np

from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import Words
from moestro.types import GRAMMAR_FAULT, SamplingParams

NO_TOKEN = "the grammar allows no token of this model here"
REFUSED = "a token was sampled that the grammar does not allow"


class Constraint:
    """The rules for one sequence. `matcher` has accepted the outputs so far."""

    def __init__(self, matcher: Matcher, sampling: SamplingParams) -> None:
        self._matcher = matcher
        self._least = sampling.min_tokens
        self._ends = tuple(dict.fromkeys((*sampling.eos_token_ids, *sampling.stop_token_ids)))
        self._ignored = tuple(set(matcher.eos_token_ids) - set(self._ends))
        self._ended: int | None = None  # number of the output that ended it

    def allow_into(self, row: Words, index: int) -> str | None:
        """Set the bits of what output number `index` may be; returns why nothing may, or None.

        Tokens that were recorded from `index` on are taken back. After the last output, and with
        an error, all bits are set.
        """
        fault = self._allow_into(row, index)
        if fault is None or fault is REFUSED:  # that would be our own fault
            return fault
        return f"{GRAMMAR_FAULT}{fault}"

    def _allow_into(self, row: Words, index: int) -> str | None:
        row.fill(-1)
        if self._ended is not None and index > self._ended:
            return None
        self._ended = None
        self._matcher.rewind(index)
        if self._matcher.count < index:
            return REFUSED
        self._matcher.mask_into(row)
        fault = self._matcher.fault
        if fault is None:
            self._ends_into(row, index)
            fault = None if row.any() else NO_TOKEN
        if fault is not None:
            row.fill(-1)
        return fault

    def record(self, token: int, index: int) -> None:
        """Output number `index` is `token`. Harmless when that was recorded already."""
        if index != self._matcher.count or self._ended is not None:
            return
        if token in self._ends:
            self._ended = index
        else:
            self._matcher.accept(token)  # when it is refused, `allow_into` will say so

    @property
    def complete(self) -> bool:
        """The outputs are all that the grammar asks for, nothing may follow, and there is no token
        to say so."""
        return not self._ends and self._matcher.finished

    def _ends_into(self, row: Words, index: int) -> None:
        may_end = self._matcher.may_end
        bits = row.view(np.uint32)
        if may_end:
            _clear(bits, self._ignored)
        allowed = self._ends
        if not may_end:
            allowed = tuple(end for end in self._ends if _has(bits, end) and self._last(end))
        _clear(bits, self._ends)
        if not (index < self._least and bits.any()):
            for token in allowed:
                bits[token // 32] |= np.uint32(1 << token % 32)

    def _last(self, token: int) -> bool:
        """Whether the grammar may end after `token`, which it allows."""
        matcher, count = self._matcher, self._matcher.count
        ends = matcher.accept(token) and matcher.may_end
        matcher.rewind(count)
        return ends


def _has(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint32]], token: int) -> bool:
    return bool(bits[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _clear(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint32]], tokens: tuple[int, ...]) -> None:
    for token in tokens:
        if token < 32 * len(bits):
            bits[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
