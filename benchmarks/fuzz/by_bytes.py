"""Sends hostile requests over raw sockets and judges the replies.

Owns: connections, patience, and what must hold when no answer is due. Does not own: the requests
(`bodies`, `framing`) or what a reply may be (`verdict`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence

from benchmarks.fuzz import verdict
from benchmarks.fuzz.bodies import BODIES
from benchmarks.fuzz.framing import FRAMINGS
from benchmarks.fuzz.http import Hostile, Route

PATIENT = 0.15  # seconds to wait for an answer that need not come
WORKERS = 8


KINDS = BODIES | FRAMINGS


def hostile(known: Sequence[Route], number: int, seed: int) -> Hostile:
    """Request number so-and-so. The same numbers and routes give the same bytes."""
    dice = random.Random(f"{seed} {number}")
    names = list(KINDS)
    kind = names[number % len(names)]
    usual = [route for route in known if route.body is not None]
    if kind == "forms":  # for what takes something, but no JSON
        usual = [r for r in known if r.method == "POST" and r.body is None] or usual
    return KINDS[kind](kind, dice, dice.choice(usual if dice.random() < 0.8 else known))


class ByteFuzz:
    """Drives the routes at `port`. `faults` are what was found, each with how to send it again."""

    def __init__(self, port: int, known: Sequence[Route], *, seed: int, timeout: float) -> None:
        self._port = port
        self._known = known
        self._seed = seed
        self._timeout = timeout
        self.statuses: Counter[int | str] = Counter()
        self.faults: list[str] = []

    async def run(self, count: int) -> None:
        """Send so many requests, a few at a time, each on a connection of its own."""
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                request = hostile(self._known, number, self._seed)
                found = await self._send(request)
                if found:
                    self.faults.append(
                        f"{request.kind}: {found}\n    number {number}: {request.data[:400]!r}"
                    )

        await asyncio.gather(*itertools.starmap(worker, itertools.repeat((), WORKERS)))

    async def _send(self, request: Hostile) -> str:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            return f"no connection: {error}"
        try:
            with contextlib.suppress(OSError):  # a server that has heard enough may hang up
                writer.write(request.data)
                await writer.drain()
            return await self._judge(request, reader)
        finally:
            writer.transport.abort()

    async def _judge(self, request: Hostile, reader: asyncio.StreamReader) -> str:
        first = self._timeout if request.whole else PATIENT
        try:
            start = await asyncio.wait_for(reader.read(65536), first)
        except TimeoutError:
            self.statuses["silent"] += 1
            return f"no answer within {first:g} s" if request.whole else ""
        except OSError:
            start = b""
        if not start:
            self.statuses["closed"] += 1
            return "closed without an answer" if request.whole else ""
        try:
            rest = await asyncio.wait_for(self._rest(reader, request.whole), self._timeout)
        except TimeoutError:
            return f"an answer that does not end within {self._timeout:g} s: {start[:200]!r}"
        return self._fault(request, start + rest)

    async def _rest(self, reader: asyncio.StreamReader, whole: bool) -> bytes:
        """What follows, until the connection closes; where it may stay open, until it is quiet."""
        pieces = []
        with contextlib.suppress(OSError, TimeoutError):
            while piece := await asyncio.wait_for(reader.read(65536), None if whole else PATIENT):
                pieces.append(piece)
        return b"".join(pieces)

    def _fault(self, request: Hostile, answer: bytes) -> str:
        head, _, body = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) < 2 or words[0] != "HTTP/1.1" or not words[1].isdigit():
            return f"not HTTP: {answer[:200]!r}"
        status = int(words[1])
        self.statuses[status] += 1
        fields = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines[1:])}
        if fields.get("transfer-encoding") == "chunked":
            body = _joined(body)
        elif "content-length" in fields:
            body = body[
                : int(fields["content-length"])
            ]  # an answer to what followed may come after
        content_type = fields.get("content-type", "")
        return verdict.fault(request.path, status, content_type, body, head=request.head)


def _joined(chunks: bytes) -> bytes:
    """The body in a chunked one, as far as it goes."""
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            break
        body, chunks = body + chunks[:length], chunks[length + 2 :]
    return body
