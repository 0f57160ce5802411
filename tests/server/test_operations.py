"""Public bug cases 45, 47 and 49: health, draining, a dead engine, a full queue."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
import uvicorn
from sse_starlette.sse import AppStatus

from tests.server.conftest import Make, Setup, saying
from tests.server.metrics import samples, series
from tests.server.sse import parse
from tests.server.test_streams import opened

PROBES = ("/health", "/v1/health", "/ping", "/ready")


async def test_case_47_health_tells_the_truth(make: Make) -> None:
    async with make("hello") as server:
        for path in PROBES:
            response = await server.client.get(path)
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        server.engine.state = "loading"
        for path in PROBES:
            response = await server.client.get(path)
            assert response.status_code == 503
            assert response.json() == {
                "status": "loading",
                "stage": "weights",
                "done": 1,
                "total": 4,
                "progress": 0.25,
                "stalled": False,
                "error": None,
            }
        server.engine.stalled = True
        assert (await server.client.get("/health")).json()["stalled"] is True
        server.engine.stalled = False
        server.engine.state, server.engine.error = "restarting", "it ended with code -9"
        response = await server.client.get("/health")
        assert response.json()["error"] == "it ended with code -9"
        assert (response.status_code, response.json()["status"]) == (503, "restarting")
        assert response.json()["progress"] == 0.25
        server.engine.state, server.engine.stalled = "ready", True
        assert (await server.client.get("/health")).json() == {"status": "stalled"}
        server.engine.stalled = False
        server.engine.state = "dead"
        assert (await server.client.get("/health")).status_code == 503
        server.engine.state = "ready"
        assert (await server.client.head("/health")).status_code == 200
        assert (await server.client.post("/ping")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_case_47_waiting_clients_hear_of_a_dead_engine(make: Make, stream: bool) -> None:
    async with make("hello", engine={"manual": True}) as server:
        tasks = [asyncio.create_task(server.chat(stream=stream)) for _ in range(3)]
        await opened(server, 3)
        server.engine.step()
        server.engine.die("the engine process ended with code -9")
        for response in await asyncio.wait_for(asyncio.gather(*tasks), 2):
            if stream:
                (error,) = parse(response.content).errors
            else:
                assert response.status_code == 503
                error = response.json()["error"]
            assert error["code"] == "engine_dead"
        response = await server.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"


async def test_case_47_while_loading_work_is_refused_with_how_far_it_is(make: Make) -> None:
    async with make("hello", engine={"state": "loading"}) as server:
        for ask in (server.chat, server.complete):
            response = await ask()
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("overloaded_error", "loading")
            assert "1 of 4" in error["message"]
        assert (await server.post("/tokenize", {"prompt": "a"})).json()["max_model_len"] is None
        models = (await server.client.get("/v1/models")).json()
        assert models["data"][0]["max_model_len"] is None


async def test_case_47_probes_are_quick_while_a_huge_prompt_is_tokenized(make: Make) -> None:
    async with make("hello", settings={"max_request_body": 64 << 20}) as server:
        text = "lorem ipsum dolor " * (1 << 16)  # 1.2 MB
        task = asyncio.create_task(server.complete(prompt=text))
        waits = []
        while not task.done():
            started = time.monotonic()
            assert (await server.client.get("/health")).status_code == 200
            waits.append(time.monotonic() - started)
            await asyncio.sleep(0.005)
        response = await task
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert len(waits) > 5
        assert sorted(waits)[len(waits) * 9 // 10] < 0.05


async def test_case_49_draining_finishes_streams_and_refuses_work(listen: Make) -> None:
    async with listen("x" * 300, engine={"delay": 0.002}) as server:
        lifecycle = server.app.state.lifecycle
        task = asyncio.create_task(server.complete(stream=True, max_tokens=200))
        await opened(server, 1)
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(lifecycle.drain(10))
        await asyncio.sleep(0.01)
        for path in PROBES:
            response = await server.client.get(path)
            assert (response.status_code, response.json()["status"]) == (503, "draining")
        response = await server.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "draining"
        assert response.headers["retry-after"] == "1"
        assert response.headers["connection"] == "close"
        events = parse((await task).content)
        assert events.text() == "x" * 200
        assert await draining
        lifecycle.check()


def test_case_49_the_stream_library_does_not_cut_at_a_signal(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AppStatus, "enable_automatic_graceful_drain", True)
    monkeypatch.setattr(AppStatus, "should_exit", False)
    app, _ = Setup(saying("x")).build()
    uvicorn.Server(uvicorn.Config(app)).handle_exit(signal.SIGTERM, None)
    assert not AppStatus.should_exit


async def test_case_49_after_the_grace_period_an_error_event(listen: Make) -> None:
    async with listen("x", engine={"manual": True}) as server:
        whole = asyncio.create_task(server.chat())
        task = asyncio.create_task(server.chat(stream=True))
        await opened(server, 2)
        server.engine.step()
        started = time.monotonic()
        assert not await server.app.state.lifecycle.drain(0.2)
        assert time.monotonic() - started < 2
        events = parse((await task).content)
        assert events.errors[0]["code"] == "engine_dead"
        assert (await whole).status_code == 503


async def test_queue_full_is_503_with_retry_after(make: Make) -> None:
    async with make("x", engine={"seats": 1, "max_queued": 1, "manual": True}) as server:
        tasks = [asyncio.create_task(server.chat()) for _ in range(2)]
        await opened(server, 2)
        for stream in (False, True):
            response = await server.chat(stream=stream)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "queue_full"
        now = await samples(server)
        assert now[series("admission_rejections_total", reason="queue_full")] == 2
        assert now[series("num_requests_waiting")] == 1
        for _ in range(8):
            server.engine.step()
        assert [r.status_code for r in await asyncio.gather(*tasks)] == [200, 200]


async def test_short_prompts_do_not_wait_behind_long_ones(make: Make) -> None:
    async with make("x") as server:
        text = server.app.state.service.text
        long = [asyncio.create_task(text.run(time.sleep, 0.3, size=10**6)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert (await server.complete()).status_code == 200
        assert not any(task.done() for task in long)
        await asyncio.gather(*long)


async def test_case_45_nobody_sees_anothers_text(make: Make) -> None:
    def script(request: Any) -> list[int]:
        return list(request.prompt) * 20

    async with make(script, engine={"seats": 8}) as server:

        async def one(number: int) -> None:
            name = f"<{number:03}>"
            events = await server.complete_events(prompt=name, max_tokens=100)
            assert events.text() == (name * 20)[:100]

        await asyncio.gather(*map(one, range(32)))
