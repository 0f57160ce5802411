"""A small HTTP client for `moestro bench serve`, on nothing but asyncio.

Owns: one request on one connection, and server-sent events as they arrive. Does not own: what is
asked, or retries (there are none: a failed request is a result).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from moestro.errors import ConfigError, MoestroError, Unavailable

LIMIT = 1 << 20  # bytes of one line of an answer
PATIENCE = 600.0  # seconds without a byte before a server is given up


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is, and the key it wants."""

    host: str
    port: int
    tls: bool
    prefix: str
    key: str | None = None

    @property
    def local(self) -> bool:
        """It is on this machine."""
        return self.host in {"127.0.0.1", "::1", "localhost"}


def server_of(url: str, key: str | None) -> Server:
    """The server that `url` names, with or without a `/v1` at its end. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--base-url {url}: {error}", param="base_url") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"--base-url {url}: should be like http://host:8000", param="base_url")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Server(parts.hostname, port or (443 if tls else 80), tls, prefix, key)


@dataclass(slots=True)
class Reply:
    """An answer whose head has arrived."""

    status: int
    chunked: bool
    length: int | None
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it arrives."""
        if self.chunked:
            while size := int((await _line(self.reader)).split(b";")[0], 16):
                yield (await _patient(self.reader.readexactly(size + 2)))[:-2]
            return
        left = self.length
        while left is None or left > 0:
            piece = await _patient(self.reader.read(1 << 16 if left is None else left))
            if not piece:
                return
            left = None if left is None else left - len(piece)
            yield piece

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[Any]:
        """Each server-sent event as JSON until `[DONE]`. Raises Unavailable when cut."""
        left = b""
        async for piece in self.pieces():
            *lines, left = (left + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    return
                yield json.loads(text)
        raise Unavailable("a stream ended without [DONE]")


@contextlib.asynccontextmanager
async def asked(server: Server, path: str, body: Any = None) -> AsyncIterator[Reply]:
    """Ask, POST when there is a body; the connection closes at the end. Raises Unavailable."""
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(server.host, server.port, ssl=server.tls or None, limit=LIMIT),
            PATIENCE,
        )
    except (OSError, TimeoutError) as error:
        where = f"{server.host}:{server.port}"
        raise Unavailable(f"cannot reach {where}: {error or 'no answer'}") from None
    try:
        writer.write(_request(server, path, body))
        await writer.drain()
        yield await _head(reader)
    except (OSError, TimeoutError, EOFError, ValueError) as error:
        raise Unavailable(f"{path} broke off: {error or type(error).__name__}") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def fetched(server: Server, path: str) -> Any:
    """The JSON at `path`. Raises Unavailable, or MoestroError with the server's words."""
    async with asked(server, path) as reply:
        text = await reply.body()
        if reply.status != 200:
            raise refusal(path, reply.status, text)
        return json.loads(text)


def refusal(path: str, status: int, body: bytes) -> MoestroError:
    """The error for an answer that is not 200."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return MoestroError(f"{path} answered {status}: {message}")


def _request(server: Server, path: str, body: Any) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    host = f"[{server.host}]" if ":" in server.host else server.host
    lines = [
        f"{'GET' if body is None else 'POST'} {server.prefix}{path} HTTP/1.1",
        f"Host: {host}:{server.port}",
        "Connection: close",
        "Accept: */*",
    ]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    if server.key:
        lines.append(f"Authorization: Bearer {server.key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _head(reader: asyncio.StreamReader) -> Reply:
    words = (await _line(reader)).split()
    if len(words) < 2 or not words[1].isdigit():
        raise ValueError("that is no HTTP server")
    fields: dict[str, str] = {}
    while line := (await _line(reader)).strip():
        name, _, value = line.decode("latin-1").partition(":")
        fields[name.lower()] = value.strip()
    length = fields.get("content-length")
    chunked = fields.get("transfer-encoding", "").lower() == "chunked"
    return Reply(int(words[1]), chunked, int(length) if length else None, reader)


async def _line(reader: asyncio.StreamReader) -> bytes:
    line: bytes = await _patient(reader.readuntil(b"\n"))
    return line


async def _patient(reading: Any) -> Any:
    return await asyncio.wait_for(reading, PATIENCE)
