"""/v1/config: what can change while the server runs, all of it or nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from moestro.config import Config
from moestro.engine.messages import Tuning
from moestro.errors import InvalidRequest
from moestro.server.auth import hash_key
from moestro.server.live_config import LIVE
from tests.server.conftest import Make, Server

POLICY = Config.model_fields["expert_policy"].default


async def change(server: Server, **asked: Any) -> dict[str, Any]:
    response = await server.post("/v1/config", asked)
    assert response.status_code == 200, response.text
    values: dict[str, Any] = response.json()["values"]
    return values


async def refused(server: Server, status: int = 400, **asked: Any) -> dict[str, Any]:
    """The error, after checking that nothing has changed."""
    before = (await server.client.get("/v1/config")).json()
    response = await server.post("/v1/config", asked)
    assert response.status_code == status, response.text
    assert (await server.client.get("/v1/config")).json() == before
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_what_is_shown(make: Make) -> None:
    async with make("x", settings={"request_timeout": 7.0}) as server:
        shown = (await server.client.get("/v1/config")).json()
        assert shown["object"] == "config"
        values = shown["values"]
        assert values["request_timeout"] == 7
        assert values["max_num_seqs"] == 64
        assert values["max_num_batch_seqs"] == 32
        assert values["max_model_len"] == 4096  # as the engine chose
        assert values["kv_cache_tokens"] == 65536
        assert values["served_model_name"] == ["tiny", "org/tiny"]
        assert "api_key" not in values
        assert "ssl_keyfile_password" not in values
        assert set(shown["live"]) == set(LIVE)
        assert shown["live"]["max_num_seqs"] == {"type": "number", "maximum": 64}
        assert "lru" in shown["live"]["expert_policy"]["choices"]
        assert shown["live"]["log_requests"] == {"type": "boolean"}


async def test_several_settings_change_together(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with make("x") as server:
        values = await change(
            server, max_num_seqs=16, max_num_queued=9, expert_policy="lfu", request_timeout=3
        )
        assert values["max_num_seqs"] == 16
        assert values["max_num_batch_seqs"] == 8
        assert server.engine.tuned == [(Tuning(16, "lfu", "info"), 9)]
        assert (await server.client.get("/v1/config")).json()["values"] == values
    (record,) = [r for r in caplog.records if "settings changed" in r.message]
    assert record.levelno == logging.WARNING
    assert "max_num_seqs 64 -> 16" in record.message
    assert f"expert_policy {POLICY} -> lfu" in record.message
    assert "by a client without a name" in record.message


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({}, None, "No setting"),
        ({"max_num_sequ": 3}, "max_num_sequ", "did you mean max_num_seqs?"),
        ({"port": 3}, "port", "cannot change while the server runs"),
        ({"api_key": "x"}, "api_key", "cannot change"),
        ({"max_num_seqs": 65}, "max_num_seqs", "64 at most"),
        ({"max_num_seqs": 0}, "max_num_seqs", "greater than 0"),
        ({"max_num_seqs": "many"}, "max_num_seqs", "valid integer"),
        ({"max_num_seqs": None}, "max_num_seqs", "valid integer"),
        ({"max_num_batch_seqs": 65}, "max_num_batch_seqs", "64 at most"),
        ({"max_num_queued": -1}, "max_num_queued", "greater than 0"),
        ({"request_timeout": -1}, "request_timeout", "greater than or equal to 0"),
        ({"expert_policy": "none"}, "expert_policy", "'lru'"),
        ({"log_requests": "perhaps"}, "log_requests", "boolean"),
    ],
)
async def test_what_is_refused_changes_nothing(
    make: Make, asked: dict[str, Any], param: str | None, words: str
) -> None:
    async with make("x") as server:
        for others in ({}, {"send_timeout": 5} if asked else {}):
            error = await refused(server, **others, **asked)
            assert error["param"] == param
            assert words in error["message"]
        assert server.engine.tuned == []


async def test_what_the_engine_refuses_changes_nothing(make: Make) -> None:
    async with make("x") as server:
        server.engine.state = "restarting"
        error = await refused(server, 503, max_num_seqs=3, request_timeout=3)
        assert error["code"] == "engine_busy"
        await change(server, request_timeout=2)  # the engine has nothing to do with it
        server.engine.state = "ready"

        async def no(*_: Any) -> None:
            raise InvalidRequest("the file is damaged")

        server.engine.tune = no  # type: ignore[method-assign]
        error = await refused(server, 400, expert_policy="lru", request_timeout=3)
        assert error["message"] == "the file is damaged"


async def test_changes_hold_for_requests_that_follow(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with make("x" * 99, engine={"delay": 0.02}) as server:
        long = asyncio.create_task(server.complete(max_tokens=50))
        await asyncio.sleep(0.05)
        await change(server, request_timeout=0.2)
        assert (await server.complete(max_tokens=50)).status_code == 504
        assert (await long).status_code == 200  # began under the old one
        await change(server, request_timeout=0)
        await change(server, max_request_body=300)
        assert (await server.complete(prompt="a" * 300)).status_code == 413
        assert (await server.complete(model="other", max_tokens=1)).status_code == 404
        await change(server, accept_any_model=True)
        assert (await server.complete(model="other", max_tokens=1)).status_code == 200
        with caplog.at_level(logging.INFO):
            await server.complete(prompt="a-secret", max_tokens=1)
            assert "a-secret" not in caplog.text
            await change(server, log_requests=True)
            await server.complete(prompt="a-secret", max_tokens=1)
            assert "a-secret" in caplog.text
        await change(server, sse_keep_alive_interval=0.01)
        response = await server.complete(max_tokens=10, stream=True)
        assert ": keep-alive" in response.text


async def test_the_level_of_the_log(make: Make) -> None:
    root = logging.getLogger()
    before = root.level
    try:
        async with make("x") as server:
            await change(server, log_level="error")
            assert root.level == logging.ERROR
            assert server.engine.tuned == [(Tuning(64, POLICY, "error"), 1024)]
    finally:
        root.setLevel(before)


async def test_a_rate_limit_comes_and_goes(make: Make) -> None:
    async with make("x") as server:

        async def statuses(count: int) -> list[int]:
            return [(await server.client.get("/v1/models")).status_code for _ in range(count)]

        assert await statuses(5) == [200] * 5
        await change(server, rate_limit=4)
        assert await statuses(5) == [200] * 4 + [429]
        # What was taken stays taken: four of these six are gone.
        server.app.state.service.live.on_change[0](_with_rate(server, 6))
        assert await statuses(3) == [200] * 2 + [429]
        server.app.state.service.live.on_change[0](_with_rate(server, None))
        assert await statuses(9) == [200] * 9


def _with_rate(server: Server, rate: int | None) -> Any:
    from dataclasses import replace

    return replace(server.app.state.service.settings, rate_limit=rate)


async def test_changes_come_one_after_the_other(make: Make) -> None:
    async with make("x") as server:
        await asyncio.gather(*(change(server, max_num_seqs=n) for n in range(1, 20)))
        last, _ = server.engine.tuned[-1]
        values = (await server.client.get("/v1/config")).json()["values"]
        assert values["max_num_seqs"] == last.max_num_seqs
        assert len(server.engine.tuned) == 19


async def test_who_changed_it_is_in_the_log(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna:sesame\n")
    async with make("x", settings={"api_key_file": keys}) as server:
        headers = {"authorization": "Bearer sesame", "x-request-id": "job-7"}
        body = {"request_timeout": 1}
        response = await server.client.post("/v1/config", json=body, headers=headers)
        assert response.status_code == 200
    (record,) = [r for r in caplog.records if "settings changed" in r.message]
    assert "by anna: request_timeout 0.0 -> 1.0" in record.message
    assert record.request_id == "job-7"  # type: ignore[attr-defined]
    assert "sesame" not in caplog.text


async def test_every_route_that_is_not_open_needs_a_key(make: Make) -> None:
    from moestro.server.auth import OPEN_PATHS

    settings = {"api_key_hashes": (hash_key("one"),)}
    async with make("x", settings=settings) as server:
        routes = [
            (method, route.path.replace("{id:path}", "tiny").replace("{id}", "some"))
            for route in server.app.routes
            for method in getattr(route, "methods", ())
        ]
        assert ("POST", "/v1/config") in routes
        assert ("GET", "/admin/stats") in routes
        assert ("GET", "/v1/files/some/content") in routes
        open_ones = set()
        for method, path in routes:
            response = await server.client.request(method, path)
            if path in OPEN_PATHS:
                open_ones.add(path)
                assert response.status_code != 401, (method, path)
            else:
                assert response.status_code == 401, (method, path)
        assert "/metrics" in open_ones


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_page_of_another_site_changes_nothing(make: Make, kind: str) -> None:
    async with make("x") as server:
        headers = {"content-type": kind}
        body = b'{"request_timeout": 1}'
        response = await server.client.post("/v1/config", content=body, headers=headers)
        assert response.status_code == 400
        assert "application/json" in response.json()["error"]["message"]
        values = (await server.client.get("/v1/config")).json()["values"]
        assert values["request_timeout"] == 0
