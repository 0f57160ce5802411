"""What surrounds every request, as pure ASGI: ids, timing, keys and the body limit.

Owns: headers that every reply carries, the last-resort error reply, and how a body is read.
Does not own: routes. BaseHTTPMiddleware is not used, because it hides disconnects and buffers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import traceback
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moestro.errors import BadKey, BodyTimeout, BodyTooLarge, MoestroError, RateLimited
from moestro.log import about
from moestro.server.auth import OPEN_PATHS
from moestro.server.keys import Key, KeyRing
from moestro.server.lifecycle import Lifecycle
from moestro.server.messages_problems import speaks_messages
from moestro.server.problems import response_of
from moestro.server.rate_limit import RateLimiter
from moestro.server.settings import ServerSettings

log = logging.getLogger(__name__)

METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"})
REQUEST_ID = "moestro.request_id"  # scope key; a handler may put the client's label there
KEY = "moestro.key"  # scope key; the `keys.Key` that the request carries
LOGGED = 4096  # bytes of a body that --log-requests shows
FORM = 1 << 20  # bytes of an upload beside its file
LINGER = 1.0  # seconds of an oversized body read and dropped, so that the client sees the 413

UPLOADS = "/v1/files"  # takes bodies as large as a file may be

HttpRecord = Callable[[str, str, int, float], None]
Settings = Callable[[], ServerSettings]  # those that hold now


def label_of(value: str | None) -> str | None:
    """Return a client's label for its request when it is safe as a header, else None."""
    if value and len(value) <= 128 and value.isascii() and value.isprintable():
        return value
    return None


def header(scope: Scope, name: bytes) -> str | None:
    """Return one request header, or None."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None


class Edge:
    """Outermost: gives every reply its id and turns what escapes into an error object."""

    def __init__(
        self, app: ASGIApp, settings: Settings, lifecycle: Lifecycle, record: HttpRecord
    ) -> None:
        self._app = app
        self._settings = settings
        self._lifecycle = lifecycle
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = _Sent(scope, send, self._lifecycle)
        body = _Overheard(receive) if self._settings().log_requests else None
        receive = body or receive
        try:
            if scope["path"] in OPEN_PATHS:
                await self._guarded(scope, receive, sent)
            else:
                with self._lifecycle.call():
                    await self._guarded(scope, receive, sent)
        finally:
            self._record(
                getattr(scope.get("route"), "path", "unmatched"),
                scope["method"] if scope["method"] in METHODS else "other",
                sent.status,
                time.monotonic() - sent.started,
            )
            if body is not None:
                _log_request(scope, sent, body.text())

    async def _guarded(self, scope: Scope, receive: Receive, sent: _Sent) -> None:
        try:
            await self._app(scope, receive, sent)
        except MoestroError as error:
            if sent.status:
                raise
            await response_of(error, scope)(scope, receive, sent)
        except ClientDisconnect:
            log.debug(
                "a client left before its request was complete", extra=about(scope[REQUEST_ID])
            )
        except Exception as exc:
            # The text of the exception may hold what the user wrote: log where, not what.
            trace = "".join(traceback.format_tb(exc.__traceback__))
            log.error(
                "unexpected %s while answering a request",
                type(exc).__name__,
                extra=about(scope[REQUEST_ID], trace),
            )
            if sent.status:
                raise MoestroError("The reply was cut by an internal error.") from None
            await response_of(MoestroError("Internal error."), scope)(scope, receive, sent)


def _log_request(scope: Scope, sent: _Sent, body: str) -> None:
    key: Key | None = scope.get(KEY)
    who = f" by {key.name}" if key is not None and key.name else ""
    took = time.monotonic() - sent.started
    log.info(
        "%s %r%s: %s in %.3f s%s",
        scope["method"],
        scope["path"][:LOGGED],
        who,
        sent.status or "left",
        took,
        f": {body}" if body else "",
        extra=about(scope[REQUEST_ID]),
    )


class _Overheard:
    """A `receive` that keeps the start of the body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._start = b""
        self._total = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        piece = message.get("body", b"")
        self._total += len(piece)
        self._start += piece[: LOGGED - len(self._start)]
        return message

    def text(self) -> str:
        """The body on one line; what does not fit is counted."""
        text = self._start.decode("utf-8", "replace")
        shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
        rest = self._total - len(self._start)
        return f"{shown} ... {rest} more bytes" if rest else shown


class _Sent:
    """A `send` that adds the common headers and remembers the status."""

    def __init__(self, scope: Scope, send: Send, lifecycle: Lifecycle) -> None:
        self._scope = scope
        self._send = send
        self._lifecycle = lifecycle
        self.started = time.monotonic()
        self.status = 0
        own = label_of(header(scope, b"x-request-id"))
        scope[REQUEST_ID] = own or f"req-{secrets.token_hex(12)}"

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._with_common(message.get("headers", ()))}
        await self._send(message)

    def _with_common(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        took = int((time.monotonic() - self.started) * 1000)
        common = [
            (b"x-request-id", self._scope[REQUEST_ID].encode("ascii")),
            (b"openai-processing-ms", str(took).encode("ascii")),
        ]
        if speaks_messages(self._scope):
            common.append((b"request-id", common[0][1]))  # the name that its clients read
        if not self._lifecycle.draining:
            return [*headers, *common]
        kept = [pair for pair in headers if pair[0] != b"connection"]
        return [*kept, *common, (b"connection", b"close")]


class KeyCheck:
    """Refuses requests without an accepted key, before their body is read."""

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call."""
        if guarded(scope):
            try:
                scope[KEY] = self._ring.find(scope["headers"])
            except BadKey as error:
                await response_of(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def guarded(scope: Scope) -> bool:
    """Whether this is a request that keys and rate limits are for."""
    if scope["type"] != "http":
        return False
    return scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS"


class RateLimit:
    """Refuses a client that asks too often, before its body is read. Stands inside `KeyCheck`."""

    def __init__(self, app: ASGIApp, limiter: RateLimiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call."""
        if guarded(scope):
            try:
                self._limiter.take(_client(scope))
            except RateLimited as error:
                await response_of(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _client(scope: Scope) -> bytes:
    key: Key | None = scope.get(KEY)
    if key is not None:
        return key.digest
    host, _ = scope.get("client") or ("", 0)
    return str(host).encode()


class BodyLimit:
    """Counts a body while it is read and gives up on one that is too large or too slow."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        settings = self._settings()
        upload = settings.files_dir is not None and scope["path"] == UPLOADS
        body = _Body(receive, settings, upload=upload)
        declared = header(scope, b"content-length") or "0"
        if declared.isdecimal() and int(declared) > body.most:
            if header(scope, b"expect") is None:
                await body.linger()
            await response_of(body.too_large(), scope)(scope, receive, send)
            return
        await self._app(scope, body, send)


class _Body:
    """A `receive` that is bounded in bytes and in time until the body is complete."""

    def __init__(self, receive: Receive, settings: ServerSettings, *, upload: bool) -> None:
        self._receive = receive
        self._patience = settings.body_timeout
        self._whole = settings.upload_deadline if upload else settings.body_deadline
        self.most = settings.max_file_size + FORM if upload else settings.max_request_body
        self._deadline = time.monotonic() + self._whole
        self._total = 0
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:  # from here on only a disconnect can come, whenever it does
            return await self._receive()
        left = self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(min(self._patience, left)):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeout(
                f"The request body did not arrive: {self._total} bytes came, then none for "
                f"{self._patience:g} s (or not all within {self._whole:g} s)."
            ) from None
        self._total += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._total > self.most:
            await self.linger()
            raise self.too_large()
        return message

    def too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is over the limit of {self.most} bytes.")

    async def linger(self) -> None:
        """Drop what still comes for a moment: closing at once would lose the reply on its way."""
        try:
            async with asyncio.timeout(LINGER):
                while not self._complete:
                    message = await self._receive()
                    self._complete = not message.get("more_body", False)
        except TimeoutError:
            return
