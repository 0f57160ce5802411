"""What one connection may carry: offers of other protocols, several requests, nothing at all."""

from __future__ import annotations

import asyncio
import json

import pytest

from moestro.server import http_protocol
from tests.server.conftest import Make, Server

BODY = b'{"prompt":"hi","max_tokens":2}'
STREAM = b'{"prompt":"hi","stream":true,"ignore_eos":true}'
WHOLE = b'{"prompt":"hi","ignore_eos":true,"max_tokens":4000}'
VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body: bytes, *headers: bytes, pieces: bool = False) -> bytes:
    if pieces:
        length = b"Transfer-Encoding: chunked"
        sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        length, sent = b"Content-Length: %d" % len(body), body
    lines = (b"POST /v1/completions HTTP/1.1", b"Host: x", length, *headers, b"", sent)
    return b"\r\n".join(lines)


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(5):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), await reader.readexactly(length)


OFFERS = (
    (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
    (b"Upgrade: websocket", b"Connection: keep-alive, Upgrade"),
)


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("cut", [None, 30, -5])
@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket"])
async def test_an_offer_of_another_protocol_is_read_past(
    listen: Make, offer: tuple[bytes, ...], cut: int | None, pieces: bool
) -> None:
    async with listen("hello") as server:
        reader, writer = await connect(server)
        data = post(BODY, *offer, pieces=pieces)
        for _ in range(2):  # the connection goes on
            writer.write(data[:cut])
            await asyncio.sleep(0.01)
            writer.write(b"" if cut is None else data[cut:])
            status, body = await answer(reader)
            assert status == 200, body
            assert json.loads(body)["choices"][0]["text"] == "he"
        writer.close()


async def test_a_tunnel_is_refused(listen: Make) -> None:
    async with listen("hello") as server:
        reader, writer = await connect(server)
        writer.write(b"CONNECT /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n" + BODY)
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
        writer.close()


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_case_40_leaving_with_another_request_waiting_behind(
    listen: Make, body: bytes
) -> None:
    async with listen("hello", engine={"delay": 0.002}) as server:
        _, writer = await connect(server)
        writer.write(post(body) + VERSION + post(BODY))
        async with asyncio.timeout(5):
            while not server.engine.open_ids:
                await asyncio.sleep(0.005)
        writer.close()
        await server.idle()
        assert len(server.engine.aborted) == 1
        assert len(server.engine.opened) == 1  # who has left is not served


async def test_requests_behind_each_other_are_answered_in_order(listen: Make) -> None:
    async with listen("hello") as server:
        reader, writer = await connect(server)
        writer.write(post(BODY) + VERSION + post(BODY))
        bodies = [json.loads((await answer(reader))[1]) for _ in range(3)]
        assert ["choices" in body for body in bodies] == [True, False, True]
        writer.close()


@pytest.mark.parametrize("sent", [b"", VERSION], ids=["first", "later"])
async def test_empty_lines_do_not_hold_a_connection(
    listen: Make, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    async with listen("hello") as server:
        reader, writer = await connect(server)
        if sent:
            writer.write(sent)
            assert (await answer(reader))[0] == 200
        writer.write(b"\r\n")
        assert (await answer(reader))[0] == 408
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
