"""Whether new work is taken. Owns: draining, the count of calls in flight, and the health verdict.

Does not own: signals (the command line does) or the engine's state, which it only reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from moestro.errors import EngineDead, Unavailable
from moestro.server.engine_port import DEAD, READY, RESTARTING, Engine


class Lifecycle:
    """From start to the last answered call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.live = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count one call as live while the context is open."""
        self.live += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.live -= 1
            if self.live == 0:
                self._idle.set()

    def check(self) -> None:
        """Assert that no call is open. For tests, when idle."""
        assert self.live == 0, f"{self.live} calls still open"

    def verdict(self) -> str:
        """Return "ok", "draining", "dead", "loading", "restarting" or "stalled"."""
        if self._engine.state == DEAD:
            return "dead"
        if self.draining:
            return "draining"
        if self._engine.state == RESTARTING:
            return "restarting"
        if self._engine.state != READY:
            return "loading"
        return "stalled" if self._engine.stalled else "ok"

    def admit(self) -> None:
        """Raise `Unavailable` unless new work can be taken. A stalled engine still queues."""
        verdict = self.verdict()
        if verdict == "dead":
            raise EngineDead("The engine is not running; see the server's log.")
        if verdict == "draining":
            raise Unavailable("The server is shutting down.", code="draining")
        if verdict == "loading":
            stage, done, total = self._engine.progress
            raise Unavailable(
                f"The model is still loading ({stage}: {done} of {total}).", code="loading"
            )

    def begin_drain(self) -> None:
        """Refuse new work from now on; live calls go on. Idempotent; safe in a signal handler."""
        self.draining = True

    async def drain(self, grace: float, flush: float = 5.0) -> bool:
        """Stop taking work, give live calls `grace` seconds, then end them with an error.

        Returns True when every call ended by itself. Ending the engine is what ends the rest:
        their streams get an error event instead of a silent cut, within `flush` seconds.
        """
        self.begin_drain()
        if await self._idle_within(grace):
            return True
        await self._engine.aclose()
        await self._idle_within(flush)
        return False

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
