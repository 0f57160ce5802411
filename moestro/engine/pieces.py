"""How large one piece of a sweep is, so that a decode step never waits long for it.

Owns: the arithmetic from a number of FLOPs to rows and queries. Does not own: what is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pieces:
    """How many rows make one piece of each kind, from a number of FLOPs per piece."""

    flops: float
    hidden: int

    def rows(self, width: int) -> int:
        """Rows of a projection from `hidden` to `width`."""
        return self.items(2.0 * self.hidden * max(width, 1))

    def items(self, flops: float) -> int:
        """Rows of any work of so many FLOPs each."""
        return max(16, int(self.flops / flops))

    def queries(self, start: int, heads: int, head_dim: int) -> int:
        """Queries from position `start` on, each of which sees all keys up to its own: the n for
        which n * (start + n) products are one piece."""
        products = self.flops / (4.0 * heads * head_dim)
        return max(8, int((math.sqrt(start * start + 4.0 * products) - start) / 2.0))

    def heads(self, end: int, count: int, head_dim: int) -> int:
        """How many of `count` heads make one piece, for 8 queries that see `end` keys."""
        return min(count, max(1, int(self.flops / (4.0 * 8 * end * head_dim))))
