"""The life of the two processes: ready, draining, killed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.story import Story
from tests.oracle import wire
from tests.oracle.serving import Served, serve

FOR_EVER = {"max_tokens": 8000, "ignore_eos": True}


@pytest.fixture
def server(story: Story, tmp_path: Path) -> Iterator[Served]:
    """A server of its own: these tests end it."""
    with serve(story.folder, "--shutdown-timeout", "20", log=tmp_path / "log") as served:
        yield served


async def stream(server: Served, story: Story, tokens: int = 8000) -> wire.Reply:
    """A stream that has begun."""
    body = story.completion("alphabet", **(FOR_EVER | {"max_tokens": tokens})) | {"stream": True}
    reply = await wire.ask(server.port, "/v1/completions", body)
    assert reply.status == 200
    return reply


@pytest.fixture
def last_engine(story: Story, tmp_path: Path) -> Iterator[Served]:
    """A server that starts no second engine."""
    with serve(story.folder, "--engine-restarts", "0", log=tmp_path / "log") as served:
        yield served


async def test_a_killed_engine_is_told_at_once(last_engine: Served, story: Story) -> None:
    server = last_engine
    live = await stream(server, story)
    body = story.completion("alphabet", **FOR_EVER)
    waiting = asyncio.create_task(wire.ask(server.port, "/v1/completions", body))
    await asyncio.to_thread(server.wait, lambda s: s["scheduler"]["decoding"] == 2, "decoding")
    server.engine.kill()
    events = [event async for event in live.events()]  # also asserts that [DONE] ends it
    assert "error" in events[-1]
    assert events[-1]["error"]["message"]
    assert not any("error" in event for event in events[:-1])
    answer = await waiting
    assert answer.status in (500, 503)
    assert (await answer.json())["error"]["message"]
    for path, want in (("/health", 503), ("/metrics", 200)):
        status, _ = await wire.get(server.port, path)
        assert status == want, path
    refused = await wire.ask(server.port, "/v1/completions", body)
    assert refused.status == 503
    for reply in (live, answer, refused):
        await reply.leave()


async def test_sigterm_lets_live_streams_finish(server: Served, story: Story) -> None:
    tokens = 1500
    live = await stream(server, story, tokens)
    events = live.events()
    text = (await anext(events))["choices"][0]["text"]
    server.process.send_signal(signal.SIGTERM)
    refused = await refusal(server, story)
    assert int(refused.headers["retry-after"]) >= 1
    assert (await wire.get(server.port, "/health"))[0] == 503
    async for event in events:
        text += "".join(choice["text"] for choice in event["choices"])
    assert text == story.said("alphabet", tokens)
    assert await asyncio.to_thread(server.process.wait, 15) == 0
    for reply in (live, refused):
        await reply.leave()


async def refusal(server: Served, story: Story) -> wire.Reply:
    """The first refusal after a stop was asked for."""
    for _ in range(100):
        reply = await wire.ask(server.port, "/v1/completions", story.completion("letters"))
        if reply.status == 503:
            return reply
        await reply.leave()
        await asyncio.sleep(0.02)
    raise AssertionError("new work is still taken")


async def test_the_grace_period_ends_in_an_error_not_in_a_cut(story: Story, tmp_path: Path) -> None:
    with serve(story.folder, "--shutdown-timeout", "0.5", log=tmp_path / "log") as server:
        live = await stream(server, story)
        server.process.send_signal(signal.SIGTERM)
        events = [event async for event in live.events()]
        assert "error" in events[-1]
        assert await asyncio.to_thread(server.process.wait, 15) == 0
        await live.leave()


def test_the_log_has_no_text_of_users(server: Served, story: Story) -> None:
    secret = "a-word-nobody-else-says"
    for body in (
        {"prompt": secret, "max_tokens": 3},
        {"prompt": secret, "max_tokens": -1},
        {"messages": [{"role": "user", "content": secret}], "max_tokens": 3},
        {"model": secret, "prompt": "x"},
    ):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        asyncio.run(_ask(server, path, body))
    assert secret not in server.log.read_text()


async def _ask(server: Served, path: str, body: object) -> None:
    reply = await wire.ask(server.port, path, body)
    json.loads(await reply.body())
    await reply.leave()
