"""From a running generation to an HTTP reply. Owns: the two ways to answer, and noticing that the
client left. The wire formats themselves are in `chat_wire` and `completion_wire`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moestro.errors import MoestroError
from moestro.log import about
from moestro.server.choice import Piece
from moestro.server.deadline import Deadline
from moestro.server.edge import REQUEST_ID
from moestro.server.generation import Generation, Usage
from moestro.server.settings import ServerSettings
from moestro.server.wire import dump, reply

log = logging.getLogger(__name__)

T = TypeVar("T")


class Wire(Protocol):
    """One endpoint's spelling of a generation, as complete server-sent events or as one body."""

    def start(self, generation: Generation) -> str:
        """Return the events that come before anything was generated, possibly none."""
        ...

    def first(self, generation: Generation, index: int) -> str:
        """Return the events that come before the first piece of choice `index`, possibly none."""
        ...

    def piece(self, generation: Generation, index: int, piece: Piece) -> str:
        """Return the events for one piece, the one that ends a choice included."""
        ...

    def end(self, generation: Generation) -> str:
        """Return the events that come after the last piece."""
        ...

    def failed(self, generation: Generation, error: MoestroError) -> str:
        """Return the events that end a stream which cannot go on."""
        ...

    def whole(self, generation: Generation, pieces: list[list[Piece]]) -> dict[str, Any]:
        """Return the body of a reply that is not streamed, from every choice's pieces."""
        ...


class ClientGone(Exception):
    """The client closed the connection before the reply was ready."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it and raise `ClientGone` when the client leaves.

    The request's body must have been read: what comes after it can only be the disconnect.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def usage_suffix(generation: Generation) -> str:
    """Return what continuous_usage_stats adds at the end of a chunk."""
    return f',"usage":{dump(usage_json(generation.usage()))}'


async def collect(generation: Generation, wire: Wire) -> Response:
    """Run a generation to its end and return the whole reply."""
    pieces: list[list[Piece]] = [[] for _ in generation.choices]
    async with generation:
        async for batch in generation.pieces():
            for index, piece in batch:
                pieces[index].append(piece)
    return reply(wire.whole(generation, pieces))


class TokenStream(EventSourceResponse):
    """A streamed reply. Holds the generation from the first byte to the last, whatever happens."""

    def __init__(
        self,
        generation: Generation,
        wire: Wire,
        settings: ServerSettings,
        deadline: Deadline | None = None,
    ) -> None:
        self._generation = generation
        self._deadline = deadline
        self._wire = wire
        self._seen: set[int] = set()  # choices that were introduced
        self._patience = settings.send_timeout
        self._since = 0.0  # when the send that is under way began; 0 = none is
        self._sender: asyncio.Task[Any] | None = None
        self._stalled = False
        self._timer: asyncio.TimerHandle | None = None
        self._request_id: str | None = None
        super().__init__(
            self._events(),
            headers={"cache-control": "no-cache"},
            ping=settings.ping_interval,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            sep="\n",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; the engine's side is released even when nothing was ever sent."""
        self._request_id = scope.get(REQUEST_ID)
        async with self._generation:
            try:
                self._look()
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                log.info(
                    "a client took nothing for %g s: its stream was ended",
                    self._patience,
                    extra=about(self._request_id),
                )
            finally:
                if self._timer is not None:
                    self._timer.cancel()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # One timer for the whole stream: the library's cancel scope around every single send
        # costs more than all the rest of a chunk.
        if self._since:  # a keep-alive comment behind a piece that is not taken: that one counts
            await send(message)
            return
        if self._sender is None:  # one task sends all pieces
            self._sender = asyncio.current_task()
        self._since = time.monotonic()
        try:
            await send(message)
        except asyncio.CancelledError:
            if not self._stalled or self._sender is None:
                raise
            self._sender.uncancel()
            raise SendTimeoutError from None
        finally:
            self._since = 0.0

    def _look(self) -> None:
        """Cancel a send that takes too long; else look again when it would."""
        now = time.monotonic()
        due = (self._since or now) + self._patience
        if due <= now and self._sender is not None:
            self._stalled = True
            self._sender.cancel()
            return
        self._timer = asyncio.get_running_loop().call_later(due - now, self._look)

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield SSE bytes: one write per batch, the end marker in the same write as the last."""
        try:
            start = self._wire.start(self._generation)
            if start:
                yield start.encode("ascii")
            pieces = self._generation.pieces()
            async for batch in self._deadline.each(pieces) if self._deadline else pieces:
                data = self._render(batch)
                if data:
                    yield data
        except MoestroError as error:
            yield self._failed(error)
        except Exception as exc:
            # The text of the exception may hold what the user wrote: log where, not what.
            trace = "".join(traceback.format_tb(exc.__traceback__))
            log.error(
                "unexpected %s in a stream",
                type(exc).__name__,
                extra=about(self._request_id, trace),
            )
            yield self._failed(MoestroError("Internal error."))

    def _failed(self, error: MoestroError) -> bytes:
        return self._wire.failed(self._generation, error).encode("ascii")

    def _render(self, batch: list[tuple[int, Piece]]) -> bytes:
        generation, wire = self._generation, self._wire
        out = [wire.first(generation, index) for index in self._starting(batch)]
        out += [wire.piece(generation, index, piece) for index, piece in batch]
        if generation.done:
            out.append(wire.end(generation))
        return "".join(out).encode("ascii")

    def _starting(self, batch: list[tuple[int, Piece]]) -> Sequence[int]:
        """Return the choices to introduce now. Those of one prompt start together, in order.

        Clients that assemble choices expect index 0 first and no gaps.
        """
        seen = self._seen
        if len(seen) == len(self._generation.choices):
            return ()
        n = self._generation.call.n
        prompts = sorted({index // n for index, _ in batch})
        new = [i for p in prompts for i in range(p * n, p * n + n) if i not in seen]
        seen.update(new)
        return new
