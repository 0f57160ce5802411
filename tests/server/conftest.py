"""A server around the fake engine: in memory for most tests, on a socket for the others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI

from moestro.server.app import create_app
from moestro.server.settings import ServerSettings, serve_options
from moestro.server.structured_check import Check
from moestro.server.template import ChatTemplate
from moestro.server.text import Text
from moestro.server.tokenizer import Tokenizer
from tests.fakes import SPECIAL, TEMPLATE, FakeEngine, Script, byte_tokenizer, spelled
from tests.server.grammars import Library
from tests.server.sse import Events, events_of


@dataclass
class Server:
    """One app with its engine, and how to ask it."""

    app: FastAPI
    engine: FakeEngine
    client: httpx.AsyncClient
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return await self.client.post(path, **kwargs)

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "hi", **fields})

    async def chat_events(self, **fields: Any) -> Events:
        return events_of(await self.chat(stream=True, **fields))

    async def complete_events(self, **fields: Any) -> Events:
        return events_of(await self.complete(stream=True, **fields))

    async def idle(self, seconds: float = 2.0) -> None:
        """Wait until nothing runs; fail when something is left over."""
        lifecycle = self.app.state.lifecycle
        for _ in range(int(seconds / 0.01)):
            if not self.engine.open_ids and not lifecycle.live:
                break
            await asyncio.sleep(0.01)
        assert self.engine.open_ids == []
        lifecycle.check()


@dataclass
class Setup:
    """What a test can choose."""

    script: Script
    pieces: Sequence[bytes] = ()
    bos: bool = False
    template: str | None = TEMPLATE
    engine: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    check: Check | None = None

    def build(self) -> tuple[FastAPI, FakeEngine]:
        config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "pad_token": SPECIAL[2]}
        backend = byte_tokenizer(self.pieces, bos=self.bos)
        tokenizer = Tokenizer(backend, config)
        template = None
        if self.template is not None:
            template = ChatTemplate(self.template, tokenizer.special_tokens, seconds=0.5)
        text = Text(tokenizer, template)
        settings = ServerSettings(
            **{"served_model_names": ("tiny", "org/tiny"), "docs": False, **(self.settings or {})}
        )
        engine = FakeEngine(self.script, **(self.engine or {}))
        check = self.check or Library(backend)
        return create_app(settings, engine, text, check=check), engine


def saying(said: str | bytes | Sequence[int]) -> Script:
    """A script that says the same to everybody."""
    tokens = spelled(said) if isinstance(said, str | bytes) else list(said)
    return lambda _request: tokens


@asynccontextmanager
async def in_memory(setup: Setup) -> AsyncIterator[Server]:
    app, engine = setup.build()
    transport = httpx.ASGITransport(app=app)
    await engine.start()
    try:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client,
        ):
            server = Server(app, engine, client)
            yield server
            await server.idle()
    finally:
        await engine.aclose()


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def on_socket(setup: Setup, *, small_buffers: bool = False) -> AsyncIterator[Server]:
    app, engine = setup.build()
    await engine.start()
    options = {**serve_options(), "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **options)
    server = _Quiet(config)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        door = server.servers[0].sockets[0]
        if small_buffers:  # inherited by every connection
            door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        port = door.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield Server(app, engine, client, port)
    finally:
        server.should_exit = True
        await task
        await engine.aclose()


Make = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def make() -> Make:
    """`async with make(script, **Setup fields) as server`: a server in memory."""

    def build(said: Any, **fields: Any) -> AbstractAsyncContextManager[Server]:
        return in_memory(Setup(said if callable(said) else saying(said), **fields))

    return build


@pytest.fixture
def listen() -> Make:
    """The same on a socket of 127.0.0.1, for what only shows there."""

    def build(said: Any, **fields: Any) -> AbstractAsyncContextManager[Server]:
        small = fields.pop("small_buffers", False)
        setup = Setup(said if callable(said) else saying(said), **fields)
        return on_socket(setup, small_buffers=small)

    return build


@pytest_asyncio.fixture(params=[False, True], ids=["lax", "strict"])
async def client(server: Server, request: pytest.FixtureRequest) -> AsyncIterator[AsyncOpenAI]:
    """The openai client of a module's `server`, without and with validation of answers."""
    async with AsyncOpenAI(
        base_url=server.url,
        api_key="none",
        max_retries=0,
        _strict_response_validation=request.param,
    ) as found:
        yield found
