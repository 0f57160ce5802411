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

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        """`per_minute` None: nobody is limited."""
        self._per_minute = per_minute
        self._each = MINUTE / (per_minute or 1)  # seconds in which one request comes back
        self._clock = clock
        self._full: OrderedDict[bytes, float] = OrderedDict()

    def change(self, per_minute: int | None) -> None:
        """Go on with another limit. What clients have taken stays taken, in requests."""
        if per_minute == self._per_minute:
            return
        now, each = self._clock(), MINUTE / (per_minute or 1)
        if per_minute is None or self._per_minute is None:
            self._full.clear()
        for client, full in self._full.items():
            self._full[client] = now + (full - now) * each / self._each
        self._per_minute, self._each = per_minute, each

    def take(self, client: bytes) -> None:
        """Take one request out of the client's bucket. Raises `RateLimited` when it is empty."""
        if self._per_minute is None:
            return
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
