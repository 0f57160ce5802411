"""The head of a request over a raw socket: its size, its time, and what is no HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moestro.server import http_protocol
from moestro.server.http_protocol import MOST_BYTES, MOST_HEADERS
from tests.server.conftest import Make, Server

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"


async def told(server: Server, *pieces: bytes) -> tuple[int, bytes]:
    """What comes back for some bytes: the status, and the reply's body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        return int(head.split()[1]), await asyncio.wait_for(reader.readexactly(length), 5)
    finally:
        writer.close()


def refused(answer: tuple[int, bytes]) -> None:
    status, body = answer
    assert status == 431
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "headers_too_large")
    assert str(MOST_HEADERS) in error["message"]


def headers(count: int, size: int = 1) -> bytes:
    return b"".join(b"h%d: %b\r\n" % (i, b"v" * size) for i in range(count))


async def test_heads_up_to_the_limits(listen: Make) -> None:
    async with listen("x") as server:
        assert (await told(server, GET, headers(MOST_HEADERS - 1), b"\r\n"))[0] == 200
        refused(await told(server, GET, headers(MOST_HEADERS), b"\r\n"))
        assert (await told(server, GET, headers(1, MOST_BYTES - 200), b"\r\n"))[0] == 200
        refused(await told(server, GET, headers(1, MOST_BYTES), b"\r\n"))
        refused(await told(server, GET, headers(60, MOST_BYTES // 50), b"\r\n"))
        long = b"GET /" + b"a" * (MOST_BYTES - 100) + b" HTTP/1.1\r\nhost: x\r\n\r\n"
        assert (await told(server, long))[0] == 404
        refused(await told(server, b"GET /" + b"a" * MOST_BYTES + b" HTTP/1.1\r\n\r\n"))
        assert (await server.complete()).status_code == 200


@pytest.mark.parametrize("start", [GET + b"h: ", b"GET /", GET + b"name"])
async def test_what_never_ends_is_refused_before_it_fills_the_memory(
    listen: Make, start: bytes
) -> None:
    async with listen("x") as server:
        refused(await told(server, start, *[b"v" * 4096] * 40))


async def test_trailers_count_too(listen: Make) -> None:
    async with listen("x") as server:
        post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        refused(await told(server, post + b"1\r\n{\r\n0\r\n", headers(MOST_HEADERS + 1)))
        refused(await told(server, post + b"1\r\n{\r\n0\r\nt: ", *[b"v" * 4096] * 40))


async def test_large_bodies_are_no_heads(listen: Make) -> None:
    async with listen("x", settings={"max_request_body": 1_000_000}) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "b" * 500_000}).encode()
        for content in (body, aiter_of(body)):
            response = await server.post("/v1/completions", content=content)
            assert response.status_code == 200


async def aiter_of(body: bytes) -> Any:
    for at in range(0, len(body), 100_000):
        yield body[at : at + 100_000]


async def test_every_request_of_a_connection_has_its_own_limits(listen: Make) -> None:
    async with listen("x") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(4):
            writer.write(GET + headers(100, 300) + b"\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)
            await reader.readuntil(b'{"status":"ok"}')
        writer.close()


async def test_what_is_no_http_gets_an_error_object(listen: Make) -> None:
    async with listen("x") as server:
        status, body = await told(server, b"what is this\r\n\r\n")
        assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n" + GET])
async def test_a_head_must_come_in_time(
    listen: Make, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    async with listen("x") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert b"HTTP/1.1 408" in answer
        assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")
        writer.close()
        slow = asyncio.create_task(server.complete())  # what came in time takes as long as it likes
        assert (await slow).status_code == 200
