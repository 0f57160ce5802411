"""A few outputs made up for a grammar, to see that it can be followed.

Owns: what is tried, and what a token may cost. Compiling computes little beyond the first token:
a grammar may run into the library's limits, or become very slow, at the second. What goes wrong
later than this tries is an error of the request while it runs.
"""

from __future__ import annotations

import random
import time

import numpy as np
from llguidance import LLMatcher

from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import Tokens

WALKS = 3
STEPS = 16  # tokens of each
SLOW = 0.025  # seconds for one token, in which all who decode beside it wait


def walk(compiled: LLMatcher, tokens: Tokens) -> str | None:
    """Return what is wrong with a compiled grammar, or None when nothing was found.

    Always the same tokens for the same grammar.
    """
    took: list[float] = []
    for number in range(WALKS):
        matcher = Matcher(compiled.deep_copy(), tokens)
        problem = _follow(matcher, tokens, random.Random(number), took)
        if problem is not None:
            return problem
    quickest_half = sorted(took)[: len(took) // 2 + 1]  # what else the machine does is no fault
    if len(took) >= WALKS and quickest_half[-1] > SLOW:
        return f"it takes {1e3 * quickest_half[-1]:.0f} ms for each token; at most {1e3 * SLOW:.0f}"
    return None


def _follow(matcher: Matcher, tokens: Tokens, dice: random.Random, took: list[float]) -> str | None:
    row = np.empty_like(tokens.real)
    ends = set(matcher.eos_token_ids)
    for _ in range(STEPS):
        started = time.monotonic()
        matcher.mask_into(row)
        if matcher.fault is None:
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            going_on = [token for token in allowed if token not in ends]
            if not going_on:
                return None
            matcher.accept(dice.choice(going_on))
        took.append(time.monotonic() - started)
        if matcher.fault is not None:
            return matcher.fault
    return None
