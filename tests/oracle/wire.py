"""A small HTTP client that can also misbehave: read slowly, stop reading, leave, reset.

Owns: one request on one connection. Cheap enough for a benchmark client that shares its cores
with the server. Does not own: what is asked, or retries (there are none).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

RESET = struct.pack("ii", 1, 0)  # linger on, zero seconds: close sends RST instead of FIN


@dataclass
class Reply:
    """An answer whose head has arrived. The body is read when asked for."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body in pieces, as they arrive."""
        if self.headers.get("transfer-encoding") != "chunked":
            left = int(self.headers.get("content-length", 0))
            if left:
                yield await self.reader.readexactly(left)
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def json(self) -> Any:
        """The whole body as JSON."""
        return json.loads(await self.body())

    async def data(self) -> AsyncIterator[str]:
        """The payload of each server-sent event, the final `[DONE]` included."""
        left = b""
        async for chunk in self.chunks():
            *events, left = (left + chunk).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event[len(b"data: ") :].decode()
        if left:
            raise AssertionError(f"the stream was cut inside an event: {left!r}")

    async def events(self) -> AsyncIterator[Any]:
        """Each event as JSON; raises if the stream does not end with `[DONE]`."""
        done = False
        async for text in self.data():
            if done:
                raise AssertionError("an event came after [DONE]")
            if text == "[DONE]":
                done = True
            else:
                yield json.loads(text)
        if not done:
            raise AssertionError("the stream ended without [DONE]")

    async def leave(self, *, reset: bool = False) -> None:
        """Close the connection, whatever is still to come."""
        await _close(self.writer, reset=reset)


async def ask(
    port: int,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    receive_buffer: int | None = None,
) -> Reply:
    """Send a request (POST when there is a body) and wait for the head of the answer."""
    reader, writer = await send(port, path, body, headers=headers, receive_buffer=receive_buffer)
    try:
        return await head(reader, writer)
    except BaseException:
        await _close(writer, reset=True)
        raise


async def send(
    port: int,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    receive_buffer: int | None = None,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request without waiting for anything. `receive_buffer` in bytes, for slow readers."""
    door = socket.socket()
    door.setblocking(False)
    limit = 2**20
    if receive_buffer is not None:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        limit = receive_buffer
    try:
        await asyncio.get_running_loop().sock_connect(door, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=door, limit=limit)
    except BaseException:
        door.close()
        raise
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: 127.0.0.1"]
    fields = {"Content-Type": "application/json", "Content-Length": str(len(content))}
    lines += [f"{name}: {value}" for name, value in (fields | dict(headers or {})).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    await writer.drain()
    return reader, writer


async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply:
    """Read the status line and the headers of an answer."""
    status = int((await reader.readline()).split()[1])
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return Reply(status, headers, reader, writer)


async def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET on a connection of its own."""
    reply = await ask(port, path)
    try:
        return reply.status, await reply.body()
    finally:
        await reply.leave()


async def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    else:
        writer.close()
    with contextlib.suppress(OSError):  # the other side may be faster
        await writer.wait_closed()
