"""Work that nobody waits for, kept behind the work that somebody waits for.

Owns: how many sequences of it may be with the engine, and how a call is marked as such. Does not
own: the order in the engine, which follows from the priority given here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from moestro.server.call import INT64, Call

BACKGROUND = "moestro.background"  # scope key: this call is background work
LAST = INT64 - 1  # the priority behind all others
LOOK = 0.05  # seconds between looks at who else is there


class Background:
    """Admits background sequences: few enough that seats stay free for everybody else.

    `limit()` is the most of them, `free()` how many seats others leave.
    """

    def __init__(self, limit: Callable[[], int], free: Callable[[], int]) -> None:
        self._limit = limit
        self._free = free
        self._turn = asyncio.Lock()  # first come, first served
        self._left = asyncio.Event()  # somebody gave seats back
        self.used = 0

    @property
    def limit(self) -> int:
        """Most sequences at the same time."""
        return self._limit()

    @asynccontextmanager
    async def seats(self, count: int) -> AsyncIterator[None]:
        """Hold `count` seats, once there is room. A call that is larger than all room runs alone.

        One sequence may always wait with the engine, so that the work never stands still.
        """
        async with self._turn:
            while self.used and self.used + count > self._room():
                self._left.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._left.wait(), LOOK)
            self.used += count
        try:
            yield
        finally:
            self.used -= count
            self._left.set()

    def _room(self) -> int:
        return max(1, min(self._limit(), self._free()))


def in_background(call: Call) -> Call:
    """The same call, marked for the engine. It arrives now: what it waited for its turn says
    nothing about the server's speed."""
    requests = [replace(r, priority=LAST, background=True) for r in call.requests]
    return replace(call, requests=tuple(requests), arrived=time.monotonic())
