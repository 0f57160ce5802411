"""What the signals do: how the server stops, and when uvicorn is told to end.

Does not own what a draining server answers and how live calls end (`server.lifecycle`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Generator

import uvicorn

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: those close the door before streams are done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave all signals alone."""
        yield


class Stop:
    """One way to stop, asked for by signals or by the program.

    The first `ask` starts draining; the door stays open meanwhile, so that new work is refused
    with a status instead of a dropped connection. The second ends all at once.
    """

    def __init__(
        self, server: HttpServer, drain: Callable[[float], Awaitable[bool]], grace: float
    ) -> None:
        self._server = server
        self._drain = drain
        self._grace = grace  # seconds that live calls have to finish
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        """Whether anybody asked."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Drain; or, when asked before, end at once."""
        if self._asked.is_set():
            logger.warning("stopping at once")
            self._server.force_exit = True
            self._server.should_exit = True
        self._asked.set()

    @contextlib.contextmanager
    def on_signals(self) -> Generator[None, None, None]:
        """While inside, SIGTERM and SIGINT ask."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def run(self) -> None:
        """Wait until asked, drain, then end the server."""
        await self._asked.wait()
        logger.info("stopping: live requests have %g s to finish", self._grace)
        if not await self._drain(self._grace):
            logger.warning("some requests did not finish within --shutdown-timeout and were ended")
        self._server.should_exit = True


@contextlib.contextmanager
def on_hangup(reload: Callable[[], None] | None) -> Generator[None, None, None]:
    """While inside, SIGHUP calls `reload`; without one it ends the process, as it always does."""
    if reload is None:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
