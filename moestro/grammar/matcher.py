"""Which tokens may come next in one sequence.

Owns: the grammar's state after the tokens so far, which depends on them alone. Does not own: what
ends a sequence (`grammar.constraint`).
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher

from moestro.grammar.vocabulary import Tokens, Words, words

# Reasons to stop that are not failures; the library is silent about what it could not do otherwise.
SOUND = ("NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence")


class Matcher:
    """The state of one sequence. `count` tokens have been accepted."""

    def __init__(self, matcher: LLMatcher, tokens: Tokens) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._scratch = np.empty(words(tokens.library.vocab_size), np.int32)
        self.count = 0

    def mask_into(self, row: Words) -> None:
        """Set the bits of the tokens that may come next; EOS is one where the grammar may end.

        row int32 [words(size)], of a model with `size` ids. After a fault nothing is allowed.
        """
        scratch = self._scratch
        self._matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
        if self.fault is None:
            np.bitwise_and(scratch[: len(row)], self._tokens.real, out=row)
        else:
            row.fill(0)

    def accept(self, token: int) -> bool:
        """Go on with `token`. False when the grammar does not allow it; the state is then as it
        was."""
        if self.fault is not None or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self.count += 1
        return True

    def rewind(self, count: int) -> None:
        """Back to the first `count` tokens; harmless when it is there."""
        if count < self.count:
            assert self._matcher.rollback(self.count - count), self._matcher.get_error()
            self.count = count

    @property
    def eos_token_ids(self) -> list[int]:
        """The ids whose bits mean that the grammar may end."""
        return self._tokens.library.eos_tokens

    @property
    def may_end(self) -> bool:
        """The tokens so far are all that the grammar asks for."""
        return self.fault is None and self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """They are, and nothing may follow."""
        return self.may_end and self._matcher.is_stopped()

    @property
    def fault(self) -> str | None:
        """Why no token can be allowed any more, or None. A fault stays."""
        if self._matcher.is_error():
            return self._matcher.get_error().partition("\n")[0]
        reason = self._matcher.stop_reason()
        return None if reason in SOUND else f"the grammar has no way on ({reason})"
