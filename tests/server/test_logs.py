"""What is logged: the two forms, request ids, and prompts only when asked for."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from moestro import log
from moestro.errors import ConfigError
from moestro.server.auth import hash_key
from moestro.server.reply import TokenStream
from tests.server.conftest import Make
from tests.server.test_doors import parse, told


@pytest.fixture
def lines() -> Iterator[Any]:
    """`lines(form)` sets logging up; `lines.text()` is what was logged."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    out = io.StringIO()

    def start(form: log.Form) -> io.StringIO:
        log.setup("info", "server", out, form)
        return out

    try:
        yield start
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def objects(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def raising(_request: Any) -> list[int]:
    raise ZeroDivisionError("-".join(["USER", "TEXT"]))  # the source line is shown


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_error_as_json(make: Make, lines: Any, stream: bool) -> None:
    out = lines("json")
    async with make(raising) as server:
        await server.post(
            "/v1/completions",
            {"prompt": "PROMPT", "stream": stream},
            headers={"x-request-id": "bench-7"},
        )
    (line,) = objects(out)
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert "edge.py" in line["exception"]
    del line["exception"]
    said = line.pop("message")
    assert said.startswith("unexpected ZeroDivisionError")
    assert line == {
        "level": "error",
        "logger": "moestro.server.edge",
        "process": "server",
        "request_id": "bench-7",
    }
    assert "PROMPT" not in out.getvalue()
    assert "USER-TEXT" not in out.getvalue()


async def test_an_unexpected_error_in_a_stream(
    make: Make, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenStream, "_render", lambda _stream, batch: raising(batch))
    out = lines("json")
    async with make("hello") as server:
        await server.chat(stream=True, request_id="mine")
    (line,) = objects(out)
    assert (line["message"], line["request_id"]) == (
        "unexpected ZeroDivisionError in a stream",
        "mine",
    )
    assert "reply.py" in line["exception"]
    assert "USER-TEXT" not in out.getvalue()


async def test_the_same_as_text(make: Make, lines: Any) -> None:
    out = lines("text")
    async with make(raising) as server:
        await server.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "b 7"})
    first, second = out.getvalue().splitlines()[:2]
    assert first.endswith(
        "error server unexpected ZeroDivisionError while answering a request [b 7]"
    )
    assert second.startswith('  File "')


def test_exceptions_and_line_breaks_stay_on_one_line(lines: Any) -> None:
    out = lines("json")
    try:
        raise ValueError("why\nnot")
    except ValueError:
        logging.getLogger("x").exception("two\nlines %d", 1)
    (line,) = objects(out)
    assert line["message"] == "two\nlines 1"
    assert line["exception"].endswith("ValueError: why\nnot")
    assert "request_id" not in line


async def test_requests_are_logged_only_when_asked(make: Make, lines: Any, tmp_path: Path) -> None:
    out = lines("json")
    async with make("x", settings=told(tmp_path)) as server:
        await server.complete(prompt="PROMPT")
    assert out.getvalue() == ""
    keys = tmp_path / "keys"
    keys.write_text("anna:sesame")
    settings = told(tmp_path, "--log-requests", "--api-key-file", str(keys))
    async with make("OUTPUT", settings=settings) as server:
        headers = {"authorization": "Bearer sesame", "x-request-id": "mine"}
        body = {"prompt": "PROMPT é\u2028" + "p" * 5000}
        await server.post("/v1/completions", body, headers=headers)
        refused = await server.client.get("/v1/models?key=SECRET")
        await server.client.get("/health", headers={"x-request-id": "x" * 129})
    first, second, third = objects(out)
    assert first["message"].startswith("POST '/v1/completions' by anna: 400 in 0.")
    assert "PROMPT é\\x2028ppp" in first["message"]
    assert first["message"].endswith("more bytes")
    assert first["request_id"] == "mine"
    assert second["message"].startswith("GET '/v1/models': 401 in 0.")
    assert second["request_id"] == refused.headers["x-request-id"]
    assert third["request_id"].startswith("req-")
    for hidden in ("sesame", "SECRET", "OUTPUT", hash_key("sesame").hex()):
        assert hidden not in out.getvalue()


async def test_a_streamed_request_is_logged_once_it_is_over(
    make: Make, lines: Any, tmp_path: Path
) -> None:
    out = lines("text")
    async with make("hello", settings=told(tmp_path, "--log-requests")) as server:
        assert not (await server.chat_events(request_id="label")).errors
    assert out.getvalue().count("\n") == 1
    assert "POST '/v1/chat/completions': 200 in " in out.getvalue()
    assert out.getvalue().endswith(" [label]\n")


def test_bad_forms() -> None:
    with pytest.raises(ConfigError, match="--log-format 'xml': should be 'text' or 'json'"):
        parse("--log-format", "xml")
