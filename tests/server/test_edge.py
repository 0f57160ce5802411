"""Public bug case 52, and what surrounds every request: keys, ids, names, errors, logs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from moestro.server.auth import hash_key
from moestro.server.settings import serve_options
from tests.server.conftest import Make

PROBES = ("/health", "/v1/health", "/ping", "/ready")


async def test_case_52_bodies_up_to_the_limit(make: Make) -> None:
    limit = 200_000
    async with make("x", settings={"max_request_body": limit}) as server:
        for size, status in ((8192, 400), (limit, 400), (limit + 1, 413), (3 * limit, 413)):
            head, tail = b'{"prompt":"', b'"}'
            body = head + b"a" * (size - len(head) - len(tail)) + tail
            response = await server.post("/v1/completions", content=body)
            assert response.status_code == status, size
            error = response.json()["error"]
            assert error["code"] == (
                "request_too_large" if status == 413 else "context_length_exceeded"
            )
        assert (await server.complete(prompt="a" * 4000)).status_code == 200


async def chunked(pieces: int, size: int) -> Any:
    for _ in range(pieces):
        yield b" " * size
        await asyncio.sleep(0)


async def test_case_52_a_chunked_body_is_counted_while_it_comes(listen: Make) -> None:
    async with listen("x", settings={"max_request_body": 100_000}) as server:
        response = await server.post("/v1/completions", content=chunked(400, 65536))
        assert response.status_code == 413
        assert response.json()["error"]["message"].endswith("100000 bytes.")
        response = await server.post("/v1/completions", content=b" " * 5_000_000)
        assert response.status_code == 413
        assert (await server.complete()).status_code == 200


async def test_case_52_an_announced_body_is_refused_before_it_is_sent(listen: Make) -> None:
    async with listen("x", settings={"max_request_body": 1000}) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n"
        writer.write(head + b"expect: 100-continue\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 0.9)
        assert answer.startswith(b"HTTP/1.1 413")
        writer.close()


@pytest.mark.parametrize("sent", [b"", b'{"prompt":"a"'])
async def test_case_52_a_stalled_body_times_out(listen: Make, sent: bytes) -> None:
    async with listen("x", settings={"body_timeout": 0.2}) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n" + sent
        )
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer
        writer.close()
        await server.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_case_52_the_limits_end_with_the_body(make: Make, stream: bool) -> None:
    settings = {"body_timeout": 0.05, "body_deadline": 0.1}
    async with make("x" * 20, engine={"delay": 0.03}, settings=settings) as server:
        response = await server.complete(max_tokens=10, stream=stream)
        assert response.status_code == 200
        assert ("x" * 10 in response.text) != stream
        assert '"finish_reason":"length"' in response.text


async def test_case_52_a_trickling_body_times_out(listen: Make) -> None:
    async with listen("x", settings={"body_deadline": 0.3}) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n")
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
        assert answer.result().startswith(b"HTTP/1.1 408")
        writer.close()


KEYS = {"api_key_hashes": (hash_key("one"), hash_key("twö"))}
GUARDED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/tokenize"),
    ("GET", "/admin/stats"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_bug_n_without_a_key_nothing_is_answered(make: Make, method: str, path: str) -> None:
    async with make("x", settings=KEYS) as server:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer "},
            {"authorization": "one"},
            {"authorization": "Basic one"},
            {"x-api-key": "wrong"},
        ):
            response = await server.client.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert "wrong" not in response.text
            assert "x-request-id" in response.headers


async def test_every_key_works_and_probes_need_none(make: Make) -> None:
    async with make("x", settings=KEYS) as server:
        for headers in (
            {"authorization": "Bearer one"},
            {"authorization": b"bearer  tw\xc3\xb6"},
            {"x-api-key": "one"},
        ):
            response = await server.client.get("/v1/models", headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 200
        for path in (*PROBES, "/metrics", "/version", "/"):
            assert (await server.client.get(path)).status_code == 200
        assert (await server.client.options("/v1/models")).status_code == 405


async def test_unknown_routes_and_methods_are_error_objects(make: Make) -> None:
    async with make("x") as server:
        response = await server.client.get("/nope")
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
        for path in ("/v1/models/", "/health/", "/v1/chat/completions/"):
            response = await server.client.get(path)
            assert response.status_code == 404
            assert "location" not in response.headers
        response = await server.client.get("/v1/completions")
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert response.json()["error"]["message"]


async def test_models(make: Make) -> None:
    async with make("x", settings={"model_path": "/models/tiny"}) as server:
        first = (await server.client.get("/v1/models")).json()
        assert first["object"] == "list"
        assert [entry["id"] for entry in first["data"]] == ["tiny", "org/tiny"]
        assert first["data"][0]["root"] == "/models/tiny"
        assert first["data"][0]["max_model_len"] == 4096
        await asyncio.sleep(1.01)
        assert (await server.client.get("/v1/models")).json() == first
        for path in ("org/tiny", "org%2Ftiny"):
            entry = (await server.client.get(f"/v1/models/{path}")).json()
            assert entry == first["data"][1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["nope", "a/b c", "x" * 10_000, "tiny "])
async def test_unknown_models_are_404(make: Make, stream: bool, name: str) -> None:
    async with make("x") as server:
        response = await server.chat(model=name, stream=stream)
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["type"] == "invalid_request_error"
        assert len(response.text) < 400
        assert (await server.client.get("/v1/models/nope")).json()["error"]["code"] == error["code"]


async def test_names_that_are_served(make: Make) -> None:
    async with make("x") as server:
        for asked, shown in ((None, "tiny"), ("", "tiny"), ("org/tiny", "org/tiny")):
            assert (await server.chat(model=asked)).json()["model"] == shown
        assert (await server.chat(model=5)).status_code == 400
    async with make("x", settings={"accept_any_model": True}) as server:
        assert (await server.chat(model="gpt-4")).json()["model"] == "tiny"


async def test_request_ids(make: Make) -> None:
    async with make("x") as server:
        own = await server.client.get("/health", headers={"x-request-id": "bench-1"})
        assert own.headers["x-request-id"] == "bench-1"
        for bad in ("x" * 129, "a\tb"):
            response = await server.client.get("/health", headers={"x-request-id": bad})
            assert response.headers["x-request-id"].startswith("req-")
        response = await server.chat(request_id="label")
        assert response.headers["x-request-id"] == "label"
        assert "label" not in response.json()["id"]
        same = [(await server.chat(request_id="same")).json()["id"] for _ in range(2)]
        assert same[0] != same[1]
        assert (await server.chat(request_id="a\nb")).headers["x-request-id"].startswith("req-")
        assert int(response.headers["openai-processing-ms"]) >= 0


async def test_unexpected_errors_are_500_objects_without_the_users_text(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "-".join(["the", "secret"])

    def script(_request: Any) -> list[int]:
        raise ZeroDivisionError(secret)

    async with make(script) as server:
        response = await server.chat()
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "Internal error."
        assert secret not in response.text
    assert "ZeroDivisionError" in caplog.text
    assert secret not in caplog.text


async def test_bug_l_texts_never_reach_the_logs(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with make("OUTPUT-SECRET", engine={"per_step": 50}) as server:
            messages = [{"role": "user", "content": "PROMPT-SECRET"}]
            for stream in (False, True):
                await server.chat(messages=messages, stream=stream)
                await server.complete(prompt="PROMPT-SECRET", stream=stream)
                await server.chat(messages=messages, stream=stream, temperature="SECRET")
            await server.post("/v1/completions", content=b'{"SECRET')
    assert "SECRET" not in caplog.text


async def test_errors_never_echo_the_input(make: Make) -> None:
    async with make("x") as server:
        for fields in (
            {"temperature": "SECRET"},
            {"stop": {"SECRET": "SECRET"}},
            {"logit_bias": {"SECRET": "SECRET"}},
            {"stream_options": {"include_usage": "SECRET"}},
            {"messages": [{"role": "SECRET"}]},
            {"messages": [{"role": "user", "content": [{"type": "SECRET"}]}]},
            {"cache_salt": "SECRET@"},
            {"reasoning_effort": "SECRET"},
            {"model": "SECRET"},
            {"response_format": "SECRET"},
            {"logit_bias": "SECRET"},
            {"stop_token_ids": ["SECRET"]},
        ):
            response = await server.chat(**fields)
            assert response.status_code in (400, 404)
            assert "SECRET" not in response.text
            error = response.json()["error"]
            assert error["param"].split(".")[0] == next(iter(fields))


async def test_cors_when_configured(make: Make) -> None:
    settings = {**KEYS, "cors_origins": ("https://chat.example",)}
    async with make("x", settings=settings) as server:
        headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        response = await server.client.options("/v1/chat/completions", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        response = await server.client.get("/v1/models", headers={"origin": "https://chat.example"})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
    async with make("x") as server:
        response = await server.client.get("/health", headers={"origin": "https://chat.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_docs_can_be_left_out(make: Make) -> None:
    async with make("x") as server:
        assert (await server.client.get("/docs")).status_code == 404
        assert (await server.client.get("/openapi.json")).status_code == 404
    async with make("x", settings={"docs": True}) as server:
        schema = (await server.client.get("/openapi.json")).json()
        body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
        properties = body["content"]["application/json"]["schema"]["properties"]
        assert "messages" in properties
        assert "include_usage" in str(properties["stream_options"])
        assert "$ref" not in str(schema)
        assert (await server.client.get("/docs")).status_code == 200


async def test_keep_alive_connections_survive_gaps(listen: Make) -> None:
    assert serve_options()["timeout_keep_alive"] >= 65
    async with listen("x") as server, httpx.AsyncClient(base_url=server.url) as client:
        for _ in range(3):
            assert (await client.get("/models")).status_code == 200
            await asyncio.sleep(0.05)
