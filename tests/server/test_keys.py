"""Key files and rate limits, as a client meets them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from moestro.config import Config
from moestro.errors import ConfigError, RateLimited
from moestro.server.app import create_app
from moestro.server.auth import hash_key
from moestro.server.cli_stop import on_hangup
from moestro.server.doors import check_doors, refuse_open_door
from moestro.server.keys import read_keys
from moestro.server.rate_limit import MOST, RateLimiter
from moestro.server.settings import ServerSettings
from moestro.server.text import Text
from moestro.server.tokenizer import Tokenizer
from tests.fakes import FakeEngine, byte_tokenizer
from tests.server.conftest import Make

OPEN = ("/health", "/v1/health", "/ping", "/ready", "/metrics", "/version", "/")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# staff\n\nanna:sesame-1\n  plain-2  \nbo.b: a:b:c \n", encoding="utf-8")
    return path


async def test_keys_of_a_file_stand_beside_those_of_the_flag(make: Make, file: Path) -> None:
    settings = {"api_key_hashes": (hash_key("flag"),), "api_key_file": file}
    async with make("x", settings=settings) as server:
        for key in ("flag", "sesame-1", "plain-2", "a:b:c"):
            response = await server.client.get("/v1/models", headers=bearer(key))
            assert response.status_code == 200
        for key in ("anna", "anna:sesame-1", "# staff", "c", ""):
            response = await server.client.get("/v1/models", headers=bearer(key))
            assert response.status_code == 401


async def test_a_hangup_reads_the_file_again(
    make: Make, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def status(key: str) -> int:
        return (await server.client.get("/v1/models", headers=bearer(key))).status_code

    async with make("x", settings={"api_key_file": file}) as server:
        with on_hangup(server.app.state.keys.reload), caplog.at_level(logging.INFO):
            file.write_text("new-3")
            assert await status("new-3") == 401
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
            assert (await status("new-3"), await status("sesame-1")) == (200, 401)
            file.write_text("")
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
            assert await status("new-3") == 200
    assert "1 API keys are accepted now" in caplog.text
    assert "it holds no keys; the keys stay as they were" in caplog.text
    assert "new-3" not in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, ": No such file"),
        (b"\n# only\n", ": it holds no keys"),
        (b"good\nSECRET SECRET\n", " line 2: a key is one word"),
        (b"SECRET:\n", " line 1: a key is one word"),
        (b"SEC RET:x\n", " line 1: a name is"),
        (b"SECRET\xff", ": it is not UTF-8"),
        (b"n:SECRET\x01", " line 1: a key is one word"),
    ],
)
def test_bad_files_are_refused_without_their_text(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file .*{reason}") as caught:
        check_doors(Config(api_key_file=path))
    assert "SEC" not in caught.value.message


def test_a_file_of_keys_lets_the_server_listen_wider(file: Path) -> None:
    refuse_open_door(Config(host="0.0.0.0", api_key_file=file))


def test_keys_are_held_as_digests(file: Path) -> None:
    keys = read_keys(file)
    assert [key.name for key in keys] == ["anna", "", "bo.b"]
    assert keys[0].digest == hash_key("sesame-1")
    assert "sesame" not in repr(keys)


# --- rate limits ----------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def limited(
    clock: Clock, address: str = "1.1.1.1", **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    engine, text = FakeEngine(lambda _: [97]), Text(Tokenizer(byte_tokenizer(), {}), None)
    told = ServerSettings(("tiny",), docs=False, **settings)  # type: ignore[arg-type]
    app = create_app(told, engine, text, clock=clock)
    await engine.start()
    transport = httpx.ASGITransport(app=app, client=(address, 1))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        text.close()
        await engine.aclose()


async def test_a_key_over_its_limit_is_told_when_to_come_back() -> None:
    clock = Clock()
    keys = (hash_key("one"), hash_key("two"))
    async with limited(clock, api_key_hashes=keys, rate_limit=3) as client:
        body = {"prompt": "hi", "max_tokens": 1}
        for status in (200, 200, 200, 429, 429):
            response = await client.post("/v1/completions", json=body, headers=bearer("one"))
            assert response.status_code == status
        assert response.headers["retry-after"] == "20"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["message"] == "Over the limit of 3 requests a minute; try again in 20 s."
        assert "x-request-id" in response.headers
        assert (await client.get("/v1/models", headers=bearer("two"))).status_code == 200
        for path in OPEN:
            assert (await client.get(path)).status_code == 200
        for _ in range(9):
            assert (await client.get("/v1/models", headers=bearer("no"))).status_code == 401
        clock.now += 19.5
        response = await client.get("/v1/models", headers=bearer("one"))
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        clock.now += 0.5
        assert (await client.get("/v1/models", headers=bearer("one"))).status_code == 200
        assert (await client.get("/v1/models", headers=bearer("one"))).status_code == 429


async def test_without_keys_the_address_counts() -> None:
    clock = Clock()
    async with limited(clock, rate_limit=1) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models", headers=bearer("any"))).status_code == 429
        for _ in range(3):
            assert (await client.get("/health")).status_code == 200
        clock.now += 60
        assert (await client.get("/v1/models")).status_code == 200


def test_a_bucket_never_holds_more_than_a_minute() -> None:
    clock = Clock()
    limiter = RateLimiter(5, clock)
    clock.now += 3600
    for _ in range(5):
        limiter.take(b"a")
    with pytest.raises(RateLimited):
        limiter.take(b"a")
    limiter.take(b"b")


def test_the_number_of_clients_remembered_is_bounded() -> None:
    limiter = RateLimiter(1, Clock())
    for number in range(MOST + 10):
        limiter.take(b"%d" % number)
    assert len(limiter._full) == MOST
    with pytest.raises(RateLimited):
        limiter.take(b"%d" % MOST)


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_bad_limits(value: str) -> None:
    from tests.server.test_doors import parse

    with pytest.raises(ConfigError, match=f"--rate-limit '{value}': should be"):
        parse("--rate-limit", value)
