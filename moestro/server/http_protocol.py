"""The head of a request, as it comes from the network. Owns: how large it may be and how long it
may take, and the reply to one that is not HTTP.

httptools sets no limits: a header that never ends would fill the memory before any of our code is
called. Bodies are limited later (`edge`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from moestro.errors import BodyTimeout, HeadTooLarge, InvalidRequest, MoestroError
from moestro.server.http_connection import Connection
from moestro.server.problems import body_of
from moestro.server.wire import dump

MOST_HEADERS = 128
MOST_BYTES = 65_536  # of the address and all headers together
HEAD_SECONDS = 60.0  # from the connection, or the first byte, to the end of the head
LINGER = 1.0  # seconds in which what still comes is dropped, so that the reply is not lost
LINE = 4  # bytes of a header beside its name and value


class HeadLimits(Connection):
    """A connection with limits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._count = 0
        self._size = 0
        self._unheard = 0  # bytes since the parser said anything
        self._problem: MoestroError | None = None
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come: its request must follow."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; once a reply has refused them, drop what still comes."""
        if self._over:
            return
        self._unheard += len(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()  # empty lines before a head end the keep-alive time too
        super().data_received(data)
        if self._unheard > MOST_BYTES and not self._over:
            self._refuse(_too_large())

    def send_400_response(self, msg: str) -> None:
        """Called when the parser cannot go on, also because a callback raised."""
        self._refuse(self._problem or InvalidRequest("The request is not valid HTTP."))

    def on_message_begin(self) -> None:
        """A request begins."""
        self._count = self._size = self._unheard = 0
        self._await_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the address."""
        self._add(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer behind a body."""
        self._count += 1
        self._add(len(name) + len(value) + LINE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._unheard = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unheard = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        self._unheard = 0
        super().on_message_complete()

    def _add(self, size: int) -> None:
        self._unheard = 0
        self._size += size
        if self._size > MOST_BYTES or self._count > MOST_HEADERS:
            self._problem = _too_large()
            raise self._problem

    def _refuse(self, problem: MoestroError) -> None:
        self._over = True
        self._head_came()
        if self.transport.is_closing():
            return
        body = dump(body_of(problem)).encode("ascii")
        head = b"content-type: application/json\r\nconnection: close\r\n"
        length = b"content-length: %d\r\n\r\n" % len(body)
        if self._gives_up_reply():
            self.transport.write(STATUS_LINE[problem.status] + head + length + body)
        self.loop.call_later(LINGER, self._hang_up)

    def _hang_up(self) -> None:
        self.tell_gone()
        self.transport.close()

    def _gives_up_reply(self) -> bool:
        """Whether no other reply is on its way; a request that waits for its body gets none."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        if cycle.response_started or self.pipeline:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return True

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _head_came(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self._refuse(BodyTimeout(f"The request's head did not arrive within {HEAD_SECONDS:g} s."))


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"The request has more than {MOST_HEADERS} headers, or its address and headers are over "
        f"{MOST_BYTES} bytes."
    )
