"""Many streams from one cheap process: bytes are only kept while they come, and read afterwards.

Owns: the sockets, and which token arrived when. Does not own: when it had left (`delays`).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from dataclasses import dataclass, field

import uvloop

END = b"0\r\n\r\n"  # the last chunk of a body


@dataclass
class Arrived:
    """One stream. `times`: of each write that was received; `tokens`: how many came until then."""

    id: str = ""
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    chunks: int = 0  # events with text


@dataclass
class Round:
    """All the streams of one round, and the seconds of processor time that they cost here."""

    streams: list[Arrived]
    cpu: float


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._request = request
        self.pieces: list[tuple[float, bytes]] = []
        self.over: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))
        if data.endswith(END):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def _round(port: int, path: str, body: bytes, streams: int) -> list[_Stream]:
    loop = asyncio.get_running_loop()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    protocols = []
    for _ in range(streams):
        _, protocol = await loop.create_connection(
            lambda: _Stream(request, loop), "127.0.0.1", port
        )
        protocols.append(protocol)
    await asyncio.gather(*(protocol.over for protocol in protocols))
    return protocols


def run(port: int, path: str, body: bytes, streams: int) -> Round:
    """Run `streams` equal requests beside each other to their ends. For a process of its own.

    It does not take the server's core at each write, as a client on another machine would not.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            before = time.process_time()
            found = runner.run(_round(port, path, body, streams))
            cpu = time.process_time() - before
        return Round([_read(protocol.pieces) for protocol in found], cpu)
    finally:
        gc.enable()


def _read(pieces: list[tuple[float, bytes]]) -> Arrived:
    """Count the tokens: each is one letter. RuntimeError for anything but a complete stream."""
    whole = b"".join(data for _, data in pieces)
    if not whole.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in whole[-60:]:
        raise RuntimeError(f"a stream failed: {whole[:300]!r} ... {whole[-300:]!r}")
    arrived = Arrived()
    tokens, left = 0, b""
    for when, data in pieces:
        *lines, left = (left + data).split(b"\n")
        said = [_text(line, arrived) for line in lines if line.startswith(b"data: {")]
        new = sum(said)
        if new:
            tokens += new
            arrived.chunks += sum(count > 0 for count in said)
            arrived.times.append(when)
            arrived.tokens.append(tokens)
    return arrived


def _text(line: bytes, arrived: Arrived) -> int:
    event = json.loads(line[len(b"data: ") :])
    if "error" in event:
        raise RuntimeError(f"an error came: {event['error']}")
    arrived.id = event["id"]
    choices = event["choices"]
    if not choices:
        return 0
    delta = choices[0].get("delta") or {}
    return len(choices[0].get("text") or delta.get("content") or "")
