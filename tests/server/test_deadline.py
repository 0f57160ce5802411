"""`--request-timeout`: whole replies, streams, and what is left over afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moestro.errors import ConfigError, RequestTimeout
from moestro.server.deadline import Deadline
from tests.server.conftest import Make
from tests.server.sse import parse as parse_events
from tests.server.test_doors import parse, told

MESSAGE = "The request took longer than the limit of 0.3 s."


def limited(folder: Path) -> dict[str, Any]:
    return told(folder, "--request-timeout", "0.3")


@pytest.mark.parametrize("chat", [False, True])
async def test_a_whole_reply_is_504_and_frees_everything(
    make: Make, tmp_path: Path, chat: bool
) -> None:
    async with make("x" * 900, engine={"delay": 0.01}, settings=limited(tmp_path)) as server:
        ask = server.chat if chat else server.complete
        response = await ask(max_tokens=800, n=3)
        assert response.status_code == 504
        error = response.json()["error"]
        assert error == {
            "message": MESSAGE,
            "type": "server_error",
            "param": None,
            "code": "timeout",
        }
        assert response.headers["x-should-retry"] == "false"
        await server.idle()
        assert (await ask(max_tokens=2)).status_code == 200


async def test_waiting_in_the_queue_counts(make: Make, tmp_path: Path) -> None:
    async with make("x", engine={"manual": True}, settings=limited(tmp_path)) as server:
        response = await asyncio.wait_for(server.complete(), 5)
        assert response.status_code == 504
        await server.idle()
        events = await asyncio.wait_for(server.complete_events(), 5)
        assert [error["message"] for error in events.errors] == [MESSAGE]
        await server.idle()


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_ends_with_an_error_event(listen: Make, tmp_path: Path, chat: bool) -> None:
    async with listen("x" * 900, engine={"delay": 0.01}, settings=limited(tmp_path)) as server:
        ask = server.chat if chat else server.complete
        response = await ask(max_tokens=800, stream=True)
        assert response.status_code == 200
        assert response.text.count("xx") or response.text.count('"x"')
        (error,) = parse_events(response.content).errors
        assert (error["message"], error["code"]) == (MESSAGE, "timeout")
        assert response.text.endswith("data: [DONE]\n\n")
        await server.idle()


async def test_items_that_never_wait_end_too() -> None:
    async def endless() -> AsyncIterator[int]:
        while True:
            yield 1

    with pytest.raises(RequestTimeout):
        async for _ in Deadline(time.monotonic(), 0.05).each(endless()):
            pass


async def test_what_is_quick_enough_is_untouched(make: Make, tmp_path: Path) -> None:
    async with make("hello", settings=limited(tmp_path)) as server:
        for _ in range(3):
            assert (await server.complete()).json()["choices"][0]["text"] == "hello"
            assert not (await server.complete_events()).errors
    async with make("x" * 90, engine={"delay": 0.01}, settings=told(tmp_path)) as server:
        assert (await server.complete(max_tokens=60)).status_code == 200


def test_bad_values() -> None:
    for value in ("-1", "nan", "soon"):
        with pytest.raises(ConfigError, match=f"--request-timeout '{value}': should be"):
            parse("--request-timeout", value)
