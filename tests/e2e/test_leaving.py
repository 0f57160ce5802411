"""A client that leaves takes everything with it: queued, sweeping, decoding or nearly done,
streamed or not, one choice or three, by a clean close or by a reset."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.story import CHAINS, Story
from tests.oracle import wire
from tests.oracle.serving import Served, is_idle, serve

SEATS = 4  # sequences that run at the same time
LONG_PROMPT = 8000  # tokens: a sweep of seconds
FOR_EVER = {"max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(story: Story, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "leaving.log"
    flags = ("--max-num-seqs", str(SEATS), "--no-enable-prefix-caching")
    with serve(story.folder, *flags, log=log) as served:
        yield served


@asynccontextmanager
async def asked(port: int, body: dict[str, Any]) -> AsyncIterator[wire.Reply]:
    """A request on its own connection, closed at the end."""
    reply = await wire.ask(port, "/v1/completions", body)
    try:
        yield reply
    finally:
        await reply.leave()


async def until(server: Served, wanted: Callable[[dict[str, Any]], bool], what: str) -> None:
    """Wait for a state of the engine without holding up the event loop."""
    await asyncio.to_thread(server.wait, wanted, what)


State = Callable[[Served, dict[str, Any]], Awaitable[None]]
BODIES: dict[str, Callable[[Story], dict[str, Any]]] = {
    "queued": lambda story: story.completion("alphabet", **FOR_EVER),
    "sweeping": lambda story: story.completion("alphabet", length=LONG_PROMPT, **FOR_EVER),
    "decoding": lambda story: story.completion("alphabet", **FOR_EVER),
    "finishing": lambda story: story.completion("alphabet", max_tokens=40),
}
REACHED: dict[str, Callable[[dict[str, Any], int], bool]] = {
    "queued": lambda scheduler, n: scheduler["waiting"] == n,
    "sweeping": lambda scheduler, n: scheduler["sweeping"] > 0,
    "decoding": lambda scheduler, n: scheduler["decoding"] == n,
    "finishing": lambda scheduler, n: True,
}


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("state", BODIES)
async def test_leaving(
    state: str, stream: bool, n: int, reset: bool, server: Served, story: Story
) -> None:
    aborted = finished(server, "abort")
    hogs = SEATS if state == "queued" else 0
    async with everybody_seated(server, story, hogs):
        body = BODIES[state](story) | {"stream": stream, "n": n}
        reader, writer = await wire.send(server.port, "/v1/completions", body)
        reply = wire.Reply(0, {}, reader, writer)
        await until(server, lambda s: REACHED[state](s["scheduler"], n), state)
        if state == "finishing" and stream:
            await read_nearly_all(reply, 40 * n)
        await reply.leave(reset=reset)
        await until(server, lambda s: s["scheduler"]["waiting"] == 0, "gone from the queue")
        await until(server, lambda s: s["scheduler"]["running"] == hogs, "gone from the engine")
    await until(server, is_idle, "idle")
    if state != "finishing":
        assert finished(server, "abort") == aborted + n + hogs
    await serves_as_before(server, story)


@asynccontextmanager
async def everybody_seated(server: Served, story: Story, hogs: int) -> AsyncIterator[None]:
    """While inside, this many streams run that do not end."""
    body = story.completion("alphabet", **FOR_EVER) | {"stream": True}
    replies = [await wire.ask(server.port, "/v1/completions", body) for _ in range(hogs)]
    try:
        await until(server, lambda s: s["scheduler"]["decoding"] == hogs, "seated")
        yield
    finally:
        for reply in replies:
            await reply.leave()


async def read_nearly_all(reply: wire.Reply, tokens: int) -> None:
    """Read a stream until just before its end; one event may have several tokens."""
    seen = 0
    while seen < tokens - 2 and (line := await reply.reader.readline()):
        if line.startswith(b"data: [DONE]"):
            return
        seen += len(re.findall(rb" [A-Z](?=[ \"])", line))


def finished(server: Served, why: str) -> int:
    """Sequences that ended like this since the server started."""
    return int(server.stats()["scheduler"]["finished"].get(why, 0))


async def serves_as_before(server: Served, story: Story) -> None:
    """The next request is answered in full."""
    async with asked(server.port, story.completion("letters")) as reply:
        answer = await reply.json()
    assert answer["choices"][0]["text"] == CHAINS["letters"].text


async def test_half_of_a_crowd_leaves(server: Served, story: Story) -> None:
    bodies = [
        story.completion("alphabet", max_tokens=150, length=n, stream=True) for n in range(1, 13)
    ]
    replies = await asyncio.gather(*(wire.ask(server.port, "/v1/completions", b) for b in bodies))

    async def read(number: int, reply: wire.Reply) -> str:
        text, pieces = "", 0
        async for event in reply.events():
            text += "".join(choice["text"] for choice in event["choices"])
            pieces += 1
            if number % 2 and pieces > 3 * number:
                break
        await reply.leave(reset=number % 4 == 1)
        return text

    texts = await asyncio.gather(*(read(*pair) for pair in enumerate(replies)))
    want = story.said("alphabet", 150)
    assert texts[::2] == [want] * 6
    assert all(want.startswith(text) and text != want for text in texts[1::2])
    await until(server, is_idle, "idle")


async def test_aborts_show_in_the_metrics_with_no_further_traffic(
    server: Served, story: Story
) -> None:
    async with everybody_seated(server, story, SEATS):
        pass
    await until(server, is_idle, "idle")
    text = server.get("/metrics")[1].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    running = [float(v) for name, v in values.items() if "num_requests_running" in name]
    waiting = [float(v) for name, v in values.items() if "num_requests_waiting{" in name]
    assert running == [0.0]
    assert set(waiting) <= {0.0}
