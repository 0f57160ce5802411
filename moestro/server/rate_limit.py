"""How many requests one client may send. Owns: the buckets. Does not own: who a client is."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from moestro.errors import RateLimited

MINUTE = 60.0  # seconds
MOST = 10_000  # clients remembered; those that were silent the longest are forgotten first


class RateLimiter:
    """A token bucket for each client: it holds a minute's requests and fills steadily.

    Kept as the time when the bucket will be full again, which is all there is to know about it.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._each = MINUTE / per_minute  # seconds in which one request comes back
        self._clock = clock
        self._full: OrderedDict[bytes, float] = OrderedDict()

    def take(self, client: bytes) -> None:
        """Take one request out of the client's bucket. Raises `RateLimited` when it is empty."""
        now = self._clock()
        full = max(self._full.get(client, now), now) + self._each
        wait = full - now - MINUTE
        if wait > 1e-6:
            raise RateLimited(
                f"Over the limit of {self._per_minute} requests a minute; try again in "
                f"{math.ceil(wait)} s.",
                retry_after=math.ceil(wait),
            )
        self._full[client] = full
        self._full.move_to_end(client)
        if len(self._full) > MOST:
            self._full.popitem(last=False)
