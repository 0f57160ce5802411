"""Public bug cases 40 and I: clients that leave, stall, close halfway or read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from typing import Any

import pytest

from moestro.types import Grammar
from tests.server.conftest import Make, Server
from tests.server.test_streams import opened

SHAPES: dict[str, dict[str, Any]] = {
    "one": {"prompt": "x"},
    "three choices": {"prompt": "x", "n": 3},
    "four prompts": {"prompt": ["a", "b", "c", "d"]},
}
LONG = {"max_tokens": 4000, "ignore_eos": True}


async def connect(server: Server, fields: dict[str, Any]) -> tuple[Any, asyncio.StreamWriter]:
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def half_close(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [close, reset, half_close])
async def test_case_40_leaving_ends_every_sequence(
    listen: Make, shape: str, stream: bool, leave: Any
) -> None:
    async with listen("x", engine={"manual": True, "seats": 2}) as server:
        fields = {**SHAPES[shape], **LONG, "stream": stream}
        count = 1 if shape == "one" else 3 if "n" in fields else 4
        for steps in (0, 1, 5):  # queued or in its prompt, just started, decoding
            before = len(server.engine.opened)
            _, writer = await connect(server, fields)
            await opened(server, before + count)
            for _ in range(steps):
                server.engine.step()
                await asyncio.sleep(0)
            leave(writer)
            await server.idle(1)
            writer.close()
        assert len(server.engine.aborted) == 3 * count


@pytest.mark.parametrize("stream", [False, True])
async def test_case_40_leaving_at_the_finish_line(listen: Make, stream: bool) -> None:
    async with listen("abc", engine={"manual": True}) as server:
        for _ in range(5):
            before = len(server.engine.opened)
            _, writer = await connect(server, {"prompt": "x", "stream": stream, "max_tokens": 2})
            await opened(server, before + 1)
            server.engine.step()
            writer.close()
            server.engine.step()
            await server.idle(1)


async def test_case_i_leaving_during_tokenization_opens_nothing(listen: Make) -> None:
    async with listen("x", engine={"manual": True}) as server:
        _, writer = await connect(server, {"prompt": "word " * 200_000})
        await asyncio.sleep(0.1)
        writer.close()
        await server.idle(1)
        assert server.engine.opened == []


class Gate:
    """Grammars compile when it is opened; names those that began."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []

    def __call__(self, grammar: Grammar) -> None:
        self.begun.append(grammar.text)
        assert self.open.wait(20)

    def close(self) -> None:
        self.open.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [close, reset])
async def test_case_i_leaving_while_a_grammar_is_compiled(
    listen: Make, stream: bool, leave: Any
) -> None:
    """Nothing reaches the engine, what had not begun never does, a neighbour hears nothing of it.

    The engine's part of the same: `test_leaving_while_a_grammar_is_compiled_leaves_nothing`.
    """
    gate = Gate()
    async with listen("y" * 300, engine={"delay": 0.001}, check=gate) as server:
        grammars = server.app.state.service.grammars
        neighbour = asyncio.create_task(server.complete_events(max_tokens=250))
        await opened(server, 1)
        asked = [
            await connect(server, {"prompt": "x", "stream": stream, "n": 2, "regex": f"{n}"})
            for n in range(5)
        ]
        while len(grammars._making) < 5 or len(gate.begun) < 2:  # of its two threads
            await asyncio.sleep(0.001)
        for _, writer in asked:
            leave(writer)
        while len(grammars._making) > 2:
            await asyncio.sleep(0.001)
        assert (await neighbour).text() == "y" * 250
        await server.idle(1)
        gate.open.set()
        while grammars._making:
            await asyncio.sleep(0.001)
        assert sorted(gate.begun) == ["0", "1"]
        assert len(server.engine.opened) == 1
        assert (await server.complete(regex="2", max_tokens=3)).status_code == 200


async def test_leaving_with_half_a_body_opens_nothing(
    listen: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with listen("x") as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await server.idle(1)
        assert server.engine.opened == []
        assert (await server.complete()).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_an_abort_of_one_leaves_the_others_alone(listen: Make) -> None:
    async with listen("y" * 300, engine={"delay": 0.001}) as server:
        others = [asyncio.create_task(server.complete_events(max_tokens=250)) for _ in range(5)]
        _, writer = await connect(server, {"prompt": "x", "stream": True, **LONG})
        await opened(server, 6)
        writer.close()
        for task in others:
            assert (await task).text() == "y" * 250
        await server.idle()


def small_window(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    return sock


def ask(sock: socket.socket, fields: dict[str, Any]) -> None:
    body = json.dumps({**fields, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)


# Log-probabilities make a chunk about 2 kB, so that a stream outgrows the socket buffers soon.
WIDE = {"prompt": "x", "logprobs": 20, "max_tokens": 4000, "ignore_eos": True}


async def test_case_i_a_slow_reader_is_given_up_and_delays_nobody(
    listen: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = {"send_timeout": 0.5}
    engine = {"per_step": 4, "delay": 0.003}
    shape: dict[str, Any] = {"engine": engine, "settings": settings, "small_buffers": True}
    async with listen("z", **shape) as server, contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(small_window(server.port))
        ask(sock, WIDE)
        await opened(server, 1)
        slow = server.engine.opened[0].id
        for _ in range(20):
            body = (await server.complete(max_tokens=8, ignore_eos=True)).json()
            assert body["choices"][0]["text"] == "z" * 8
        for _ in range(500):
            if slow not in server.engine.open_ids:
                break
            await asyncio.sleep(0.01)
        assert server.engine.aborted == [slow]
        await server.idle(5)
        assert "took nothing for 0.5 s" in caplog.text


async def test_case_i_a_slow_reader_gets_everything_when_it_goes_on(listen: Make) -> None:
    async with listen("z", engine={"per_step": 4}, small_buffers=True) as server:
        sock = small_window(server.port)
        ask(sock, {**WIDE, "max_tokens": 1500})
        await opened(server, 1)
        await asyncio.sleep(0.5)
        received = await asyncio.to_thread(read_all, sock)
        assert b"data: [DONE]" in received
        text = received.count(b'"z"')
        assert text > 0
        joined = "".join(
            json.loads(line[6:])["choices"][0]["text"]
            for line in dechunk(received).splitlines()
            if line.startswith(b"data: {")
        )
        assert joined == "z" * 1500
        await server.idle()


def read_all(sock: socket.socket) -> bytes:
    sock.settimeout(10)
    parts: list[bytes] = []
    while not (parts and b"".join(parts[-2:]).endswith(b"0\r\n\r\n")):
        parts.append(sock.recv(65536))
        if not parts[-1]:
            break
    sock.close()
    return b"".join(parts)


def dechunk(data: bytes) -> bytes:
    """The body of a chunked response."""
    data = data.partition(b"\r\n\r\n")[2]
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        out += data[:length]
        data = data[length + 2 :]
    return out
