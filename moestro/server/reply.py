"""From a running generation to an HTTP reply. Owns: the two ways to answer, and noticing that the
client left. The wire formats themselves are in `chat_wire` and `completion_wire`.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moestro.errors import MoestroError
from moestro.server.choice import Piece
from moestro.server.generation import Generation, Usage
from moestro.server.problems import event_of
from moestro.server.settings import ServerSettings
from moestro.server.wire import dump, reply

log = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class Wire(Protocol):
    """One endpoint's spelling of a generation. Chunks are complete `data:` events as text."""

    def first(self, generation: Generation, index: int) -> str:
        """Return the events that come before the first piece of choice `index`, possibly none."""
        ...

    def piece(self, generation: Generation, index: int, piece: Piece) -> str:
        """Return the events for one piece, the one that ends a choice included."""
        ...

    def usage(self, generation: Generation) -> str:
        """Return the usage event."""
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
    }


def usage_suffix(generation: Generation) -> str:
    """Return what continuous_usage_stats adds at the end of every chunk."""
    if not generation.call.output.continuous_usage:
        return ""
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

    def __init__(self, generation: Generation, wire: Wire, settings: ServerSettings) -> None:
        self._generation = generation
        self._wire = wire
        super().__init__(
            self._events(),
            headers={"cache-control": "no-cache"},
            ping=settings.ping_interval,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            sep="\n",
            send_timeout=settings.send_timeout,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; the engine's side is released even when nothing was ever sent."""
        async with self._generation:
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                log.info("a client took nothing for %s s: its stream was ended", self.send_timeout)

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield SSE bytes: one write per batch, the end marker in the same write as the last."""
        try:
            async for chunk in self._chunks():
                yield chunk.encode("ascii")
        except MoestroError as error:
            yield event_of(error) + DONE
        except Exception as exc:
            # The text of the exception may hold what the user wrote: log where, not what.
            trace = "".join(traceback.format_tb(exc.__traceback__))
            log.error("unexpected %s in a stream\n%s", type(exc).__name__, trace)
            yield event_of(MoestroError("Internal error.")) + DONE

    async def _chunks(self) -> AsyncIterator[str]:
        generation, wire = self._generation, self._wire
        seen: set[int] = set()
        async for batch in generation.pieces():
            out = [wire.first(generation, index) for index in self._starting(batch, seen)]
            out += [wire.piece(generation, index, piece) for index, piece in batch]
            if generation.done:
                out.append(wire.usage(generation) if generation.call.output.include_usage else "")
                out.append(DONE.decode())
            text = "".join(out)
            if text:
                yield text

    def _starting(self, batch: list[tuple[int, Piece]], seen: set[int]) -> list[int]:
        """Return the choices to introduce now. Those of one prompt start together, in order.

        Clients that assemble choices expect index 0 first and no gaps.
        """
        if len(seen) == len(self._generation.choices):
            return []
        n = self._generation.call.n
        prompts = sorted({index // n for index, _ in batch})
        new = [i for p in prompts for i in range(p * n, p * n + n) if i not in seen]
        seen.update(new)
        return new
