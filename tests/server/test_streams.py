"""Public bug cases C (17-24): the shape of a stream, and usage."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest

from moestro.types import Request
from tests.fakes import spelled
from tests.server.conftest import Make, Server

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2},
    "stop": {"stop": "l"},
    "one token": {"max_tokens": 1},
    "empty": {"stop": "h"},
}


async def both(server: Server, path: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    ask = {"chat": server.chat, "complete": server.complete}[path]
    stream = {"chat": server.chat_events, "complete": server.complete_events}[path]
    return (await ask(**fields)).json(), await stream(**fields)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_case_17_no_chunk_without_choices_unasked(make: Make, path: str, name: str) -> None:
    async with make("hello") as server:
        _, events = await both(server, path, CALLS[name])
        assert all(chunk["choices"] for chunk in events.chunks)
        assert not any(chunk.get("usage") for chunk in events.chunks)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_case_18_usage_equals_the_whole_replys(make: Make, path: str, name: str) -> None:
    async with make("hello") as server:
        fields = CALLS[name]
        ask = {"chat": server.chat, "complete": server.complete}[path]
        whole = (await ask(**fields)).json()
        stream = {"chat": server.chat_events, "complete": server.complete_events}[path]
        events = await stream(**fields, stream_options={"include_usage": True})
        last = events.chunks[-1]
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert all(chunk["choices"] for chunk in events.chunks[:-1])
        assert all(chunk.get("usage") is None for chunk in events.chunks[:-1])


async def test_case_18_prompts_count_once_and_answers_add_up(make: Make) -> None:
    async with make("hello") as server:
        fields = {"prompt": ["ab", "cde"], "n": 3, "max_tokens": 4}
        usage = (await server.complete(**fields)).json()["usage"]
        assert usage["prompt_tokens"] == 5
        assert usage["completion_tokens"] == 2 * 3 * 4
        assert usage["total_tokens"] == 5 + 24
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2 * 3}
        events = await server.complete_events(**fields, stream_options={"include_usage": True})
        assert events.usage == usage


async def test_case_18_usage_on_every_chunk_when_asked(make: Make) -> None:
    async with make("hello") as server:
        options = {"include_usage": True, "continuous_usage_stats": True, "unknown": 1}
        events = await server.chat_events(stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in events.chunks]
        assert counts == sorted(counts)
        assert counts[0] == 1
        assert counts[-1] == len("hello") + 1


async def test_case_18_stream_options_need_a_stream(make: Make) -> None:
    async with make("hello") as server:
        response = await server.chat(stream_options={"include_usage": True})
        assert response.json()["error"]["param"] == "stream_options"
        assert (await server.chat(stream_options=None)).status_code == 200
        assert (await server.chat(stream_options={})).status_code == 200


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_case_19_one_finish_reason_at_the_end_of_each_choice(
    make: Make, path: str, name: str
) -> None:
    async with make("hello") as server:
        _, events = await both(server, path, CALLS[name])
        for index in range(CALLS[name].get("n", 1)):
            reasons = [choice["finish_reason"] for choice in events.of(index)]
            assert reasons[-1] in ("stop", "length")
            assert set(reasons[:-1]) <= {None}


async def test_case_20_no_empty_arrays_and_one_role(make: Make) -> None:
    async with make("hello") as server:
        events = await server.chat_events(n=2)
        for index in range(2):
            deltas = [choice["delta"] for choice in events.of(index)]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert deltas[-1] == {}
            assert all(set(delta) == {"content"} for delta in deltas[1:-1])


async def test_case_21_text_comes_before_the_finish_chunk(make: Make) -> None:
    async with make("hello") as server:
        events = await server.chat_events(max_tokens=5)
        *content, finish = events.of(0)
        assert finish["delta"] == {}
        assert finish["finish_reason"] == "length"
        assert "".join(choice["delta"]["content"] for choice in content) == "hello"


async def test_case_21_completions_end_with_the_last_text(make: Make) -> None:
    async with make("hello") as server:
        events = await server.complete_events(max_tokens=5)
        assert (events.of(0)[-1]["text"], events.of(0)[-1]["finish_reason"]) == ("o", "length")


@pytest.mark.parametrize("per_step", [1, 4, 100])
async def test_case_22_deltas_concatenate_under_load(make: Make, per_step: int) -> None:
    def script(request: Request) -> list[int]:
        return spelled("".join(chr(97 + token % 26) for token in request.prompt) * 5)

    async with make(script, engine={"per_step": per_step}) as server:

        async def one(number: int) -> None:
            prompt = f"stream number {number}"
            whole = (await server.complete(prompt=prompt, max_tokens=400)).json()
            events = await server.complete_events(prompt=prompt, max_tokens=400)
            assert events.text() == whole["choices"][0]["text"]

        await asyncio.gather(*map(one, range(32)))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_case_23_a_stream_ends_at_once_and_completely(listen: Make, path: str) -> None:
    async with listen("hi", engine={"manual": True}) as server:
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "prompt": "x",
            "stream": True,
            "max_tokens": 2,
            "stream_options": {"include_usage": True},
        }
        async with server.client.stream("POST", path, json=body) as response:
            chunks = response.aiter_text()
            await asyncio.sleep(0.05)
            server.engine.step()
            first = await asyncio.wait_for(anext(chunks), 1)
            assert '"h"' in first
            server.engine.step()
            rest = await asyncio.wait_for(anext(chunks), 1)
            assert rest.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in rest
            assert '"choices":[],"usage"' in rest
            with pytest.raises(StopAsyncIteration):
                await asyncio.wait_for(anext(chunks), 1)
        await server.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_case_24_errors_before_admission_have_a_status(make: Make, stream: bool) -> None:
    async with make("hi") as server:
        for fields in ({"prompt": [5] * 4096}, {"prompt": [5] * 5000}, {"temperature": 9}):
            response = await server.complete(**fields, stream=stream)
            assert response.status_code == 400
            assert "error" in response.json()
        response = await server.complete(prompt=[5] * 4096, stream=stream)
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in error["message"]
        assert server.engine.opened == []


async def test_case_24_later_failures_are_nested_error_events(make: Make) -> None:
    async with make("hi", engine={"manual": True}) as server:
        task = asyncio.create_task(server.chat_events(n=2))
        await opened(server, 2)
        server.engine.step()
        await asyncio.sleep(0.02)
        server.engine.fail_next = "the step failed: RuntimeError"
        server.engine.step()
        events = await task
        assert events.errors == [
            {
                "message": "the step failed: RuntimeError",
                "type": "server_error",
                "param": None,
                "code": "step_failed",
            }
        ]
        assert "error" in events.chunks[-1]


async def test_case_24_a_failed_step_without_a_stream_is_a_500(make: Make) -> None:
    async with make("hi", engine={"fail_next": "the step failed"}) as server:
        response = await server.chat()
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the step failed"
        assert response.headers["x-should-retry"] == "false"
        assert (await server.chat()).status_code == 200


async def opened(server: Server, count: int) -> None:
    for _ in range(500):
        if len(server.engine.opened) >= count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the request never reached the engine")


async def test_chunks_share_id_created_and_model(make: Make) -> None:
    async with make("hello") as server:
        for path, kind, prefix in (
            ("chat", "chat.completion.chunk", "chatcmpl-"),
            ("complete", "text_completion", "cmpl-"),
        ):
            _, events = await both(server, path, {"n": 2, "model": "org/tiny"})
            heads = {(c["id"], c["object"], c["created"], c["model"]) for c in events.chunks}
            assert len(heads) == 1
            id, found, created, model = heads.pop()
            assert re.fullmatch(prefix + "[0-9a-f]{24}", id)
            assert (found, model) == (kind, "org/tiny")
            assert type(created) is int


async def test_choices_appear_in_order_with_index_zero_first(make: Make) -> None:
    async with make("hello") as server:
        events = await server.chat_events(n=5)
        indices = [choice["index"] for chunk in events.chunks for choice in chunk["choices"]]
        assert indices[:5] == [0, 1, 2, 3, 4]
        assert all(len(chunk["choices"]) == 1 for chunk in events.chunks)


async def test_completion_indices_are_prompt_times_n_plus_choice(make: Make) -> None:
    def script(request: Request) -> list[int]:
        return list(request.prompt)

    async with make(script) as server:
        fields = {"prompt": ["ab", "cd", "ef"], "n": 2}
        body, events = await both(server, "complete", fields)
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == ["ab", "ab", "cd", "cd", "ef", "ef"]
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert [events.text(i) for i in range(6)] == texts


async def test_pending_tokens_of_a_choice_are_one_chunk(make: Make) -> None:
    async with make("hello world", engine={"per_step": 6}) as server:
        events = await server.chat_events()
        deltas = [c["delta"]["content"] for c in events.of(0) if c["delta"].get("content")]
        assert deltas == ["hello ", "world"]


async def test_token_ids_and_prompt_ids_on_request(make: Make) -> None:
    async with make("hi") as server:
        body, events = await both(server, "chat", {"return_token_ids": True})
        assert body["choices"][0]["token_ids"] == [*spelled("hi"), 1]
        assert body["prompt_token_ids"] == list(server.engine.opened[0].prompt)
        streamed = itertools.chain(*(c.get("token_ids", ()) for c in events.of(0)))
        assert list(streamed) == [*spelled("hi"), 1]
        assert events.chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
        body, events = await both(server, "complete", {"return_token_ids": True, "n": 2})
        for choice in body["choices"]:
            assert choice["token_ids"] == [*spelled("hi"), 1]
            assert choice["prompt_token_ids"] == spelled("hi")
            parts = events.of(choice["index"])
            assert parts[0]["prompt_token_ids"] == spelled("hi")
            assert list(itertools.chain(*(c["token_ids"] for c in parts))) == choice["token_ids"]


async def test_headers_of_a_stream(make: Make) -> None:
    async with make("hi") as server:
        response = await server.chat(stream=True)
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"].startswith("req-")
        assert "content-encoding" not in response.headers


async def test_keep_alive_comments_when_configured(listen: Make) -> None:
    async with listen("hi", engine={"delay": 0.25}, settings={"ping_interval": 0.05}) as server:
        response = await server.chat(stream=True, max_tokens=2)
        assert ": keep-alive\n\n" in response.text
        assert response.text.endswith("data: [DONE]\n\n")
