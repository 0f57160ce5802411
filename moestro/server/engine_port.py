"""What the HTTP side needs from the engine, as protocols.

Owns: the shape of that side of the contract only. `engine.handle` fulfils it across a process
border, the tests' fake in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Protocol

from moestro.engine.messages import EngineInfo, Tuning
from moestro.stats import EngineStats
from moestro.types import Request, TokenEvent

LOADING = "loading"
READY = "ready"
RESTARTING = "restarting"  # it died; what lives waits for the next one
DEAD = "dead"


class Stream(Protocol):
    """The open sequences of one call. A lease: leaving the context aborts what is unfinished.

    Leaving never waits, so it is safe while the task is being cancelled, and safe twice.
    """

    async def __aenter__(self) -> Stream:
        """Return self."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Abort what is unfinished."""
        ...

    def batches(self) -> AsyncIterator[list[TokenEvent]]:
        """Yield everything pending, never an empty list; end when every sequence has finished.

        Waits while the engine is restarted. Raises `EngineDead` when it is gone for good.
        """
        ...

    def abort(self, id: str) -> None:
        """End one sequence; no further event of it is delivered. Harmless for a finished one."""
        ...


class Engine(Protocol):
    """The engine process as the server sees it."""

    @property
    def state(self) -> str:
        """`LOADING`, `READY`, `RESTARTING` or `DEAD`."""
        ...

    @property
    def progress(self) -> tuple[str, int, int]:
        """(stage, done, total) of loading, the first time or again."""
        ...

    @property
    def error(self) -> str | None:
        """Why the engine is dead or restarted."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """The limits that hold; None until the engine was ready once."""
        ...

    @property
    def stalled(self) -> bool:
        """True when there is work and no step has ended for too long."""
        ...

    @property
    def restarts(self) -> int:
        """How often the engine was started again."""
        ...

    @property
    def foreground(self) -> int:
        """Live sequences that are not background work."""
        ...

    @property
    def snapshot(self) -> EngineStats:
        """The latest statistics, without waiting."""
        ...

    async def stats(self, timeout: float) -> EngineStats:
        """Fresh statistics, or the latest known ones after `timeout` seconds."""
        ...

    def open(self, requests: Sequence[Request]) -> Stream:
        """Admit all of the requests or none. While the engine is restarted they queue.

        Raises `ContextTooLong`, `InvalidRequest`, `QueueFull` or `Unavailable`, with nothing sent.
        """
        ...

    async def tune(self, tuning: Tuning, max_num_queued: int) -> None:
        """Change what can change while it runs; an engine that takes over gets the same.

        Raises `Unavailable` or `InvalidRequest`, and then nothing has changed.
        """
        ...

    async def start(self) -> None:
        """Start the engine; returns at once, `state` tells when it is ready."""
        ...

    async def aclose(self) -> None:
        """End the engine; open streams raise `EngineDead`."""
        ...
