"""Responses and Messages as chat does it: clients that leave, deadlines, draining and metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.conftest import Make, Server
from tests.server.sse import typed
from tests.server.test_leaving import close, half_close, reset
from tests.server.test_streams import opened

BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi", "max_output_tokens": 4000, "ignore_eos": True},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4000,
        "ignore_eos": True,
    },
}


async def connect(server: Server, path: str, fields: dict[str, Any]) -> Any:
    body = json.dumps(fields).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [close, reset, half_close])
async def test_leaving_ends_the_sequence(listen: Make, path: str, stream: bool, leave: Any) -> None:
    async with listen("x", engine={"manual": True}) as server:
        for steps in (0, 1, 5):  # queued or in its prompt, just started, decoding
            before = len(server.engine.opened)
            writer = await connect(server, path, BODIES[path] | {"stream": stream})
            await opened(server, before + 1)
            for _ in range(steps):
                server.engine.step()
                await asyncio.sleep(0)
            leave(writer)
            await server.idle(1)
            writer.close()
        assert len(server.engine.aborted) == 3


LATE = {"/v1/responses": "response.failed", "/v1/messages": "error"}


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_may_take_too_long(make: Make, path: str) -> None:
    settings = {"request_timeout": 0.1}
    async with make("x", engine={"manual": True}, settings=settings) as server:
        whole = await server.post(path, BODIES[path])
        assert whole.status_code == 504
        assert "limit of 0.1 s" in whole.json()["error"]["message"]
        last = typed(await server.post(path, BODIES[path] | {"stream": True}))[-1]
        assert last["type"] == LATE[path]
        error = last["error"] if "error" in last else last["response"]["error"]
        assert "limit of 0.1 s" in error["message"]
        assert len(server.engine.aborted) == 2


@pytest.mark.parametrize("path", BODIES)
async def test_draining_and_loading_refuse(make: Make, path: str) -> None:
    async with make("x") as server:
        server.engine.state = "loading"
        assert (await server.post(path, BODIES[path])).status_code == 503
        server.engine.state = "ready"
        server.app.state.lifecycle.begin_drain()
        response = await server.post(path, BODIES[path])
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert server.engine.opened == []


@pytest.mark.parametrize("path", BODIES)
async def test_metrics_and_ids(make: Make, path: str) -> None:
    async with make("x") as server:
        body = BODIES[path] | {"ignore_eos": False, "request_id": "mine-1"}
        response = await server.post(path, body)
        assert response.headers["x-request-id"] == "mine-1"
        text = (await server.client.get("/metrics")).text
        assert f'"{path}"' in text
        finished = [line for line in text.splitlines() if 'finished_reason="stop"' in line]
        assert any(line.endswith(" 1.0") for line in finished)


async def test_the_docs_show_the_bodies(make: Make) -> None:
    async with make("x", settings={"docs": True}) as server:
        paths = (await server.client.get("/openapi.json")).json()["paths"]
        for path, field in (("/v1/responses", "input"), ("/v1/messages", "max_tokens")):
            content = paths[path]["post"]["requestBody"]["content"]["application/json"]
            assert field in content["schema"]["properties"]
            assert field in content["schema"]["required"]
        assert "/v1/messages/count_tokens" in paths
