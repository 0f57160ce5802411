"""What the server holds of the sequences it has submitted: their events, as a lease.

Owns: events that have arrived and were not read yet. Does not own: where they come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from moestro.errors import EngineDead
from moestro.types import TokenEvent


class Stream:
    """Events of a few sequences. Leaving the context aborts what has not finished."""

    def __init__(
        self, ids: Sequence[str], drop: Callable[[str], None], death: Callable[[], str | None]
    ) -> None:
        self._open = set(ids)
        self._drop = drop
        self._death = death  # why no event will come any more, once that is so
        self._pending: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None  # of who waits for an event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for id in tuple(self._open):
            self.abort(id)

    async def batches(self) -> AsyncIterator[list[TokenEvent]]:
        """Everything that has arrived since the last batch, until all sequences are finished.

        Waits while the engine is restarted. Raises EngineDead when it is gone for good.
        """
        while self._open or self._pending:
            if not self._pending:
                reason = self._death()
                if reason is not None:
                    raise EngineDead(reason)
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                continue
            batch, self._pending = self._pending, []
            yield batch

    def abort(self, id: str) -> None:
        """End one sequence; it gives no further event. Harmless when it has ended."""
        if id in self._open:
            self._open.discard(id)
            self._drop(id)
            self.wake()

    def push(self, event: TokenEvent) -> None:
        """Called by the handle."""
        self._pending.append(event)
        if event.finish is not None:
            self._open.discard(event.id)
        self.wake()

    def wake(self) -> None:
        """Have the reader look again; the handle calls it when the engine is gone for good."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
