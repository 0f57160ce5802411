"""The real openai client, lax and strict, against the server (bug cases H and reference 5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI

from tests.server.conftest import Server, Setup, on_socket, saying

MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TEXT = "Hello, wörld 😀!"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with on_socket(Setup(saying(TEXT), engine={"per_step": 2})) as running:
        yield running
        await running.idle()


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert abs(answer.created - time.time()) < 60
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 2 * (len(TEXT.encode()) + 1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content) == TEXT.encode()


async def test_bug_a_streams_are_streams(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 5
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(TEXT.encode()) + 1


async def test_the_stream_helper(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, n=3, logprobs=True, top_logprobs=1
    ) as stream:
        events = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.delta" in events
    assert [c.message.content for c in final.choices] == [TEXT] * 3
    assert {c.message.role for c in final.choices} == {"assistant"}
    assert {c.finish_reason for c in final.choices} == {"stop"}


async def test_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=5, logprobs=1, n=2
    )
    assert [choice.text for choice in answer.choices] == ["Hello"] * 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


async def test_streamed_completions(server: Server) -> None:
    # The null that OpenAI sends before the end is no member of the strict client's Literal.
    async with AsyncOpenAI(base_url=server.url, api_key="none") as client:
        stream = await client.completions.create(
            model="tiny", prompt=[5, 6], max_tokens=50, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_echo_with_logprobs(server: Server) -> None:
    # The legal null of the first prompt token fails strict validation, so this is lax only.
    async with AsyncOpenAI(base_url=server.url, api_key="none") as client:
        answer = await client.completions.create(
            model="tiny", prompt="ab", max_tokens=1, logprobs=0, echo=True
        )
        assert answer.choices[0].text == "abH"
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.token_logprobs is not None
        assert answer.choices[0].logprobs.token_logprobs[0] is None


async def test_bug_o_models_can_be_listed_and_retrieved(client: AsyncOpenAI) -> None:
    listed = [model.id async for model in client.models.list()]
    assert listed == ["tiny", "org/tiny"]
    assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
    with pytest.raises(openai.NotFoundError) as found:
        await client.models.retrieve("nope")
    assert found.value.code == "model_not_found"


async def test_errors_become_the_right_exceptions(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    assert "from 0 to 2, not 9" in str(bad.value)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nope", messages=MESSAGES, stream=True)
    with pytest.raises(BadRequestError, match="maximum context length"):
        await client.completions.create(model="tiny", prompt=[5] * 5000, stream=True)


async def test_a_failing_stream_raises(server: Server, client: AsyncOpenAI) -> None:
    server.engine.fail_next = "the step failed: RuntimeError"
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(APIError, match="the step failed"):
        async for _ in stream:
            pass


async def test_retries_follow_the_headers(server: Server) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=2) as client:
        server.engine.fail_next = "broken"
        with pytest.raises(openai.InternalServerError, match="broken"):
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert len(server.engine.opened) == 1


async def test_the_blocking_client(server: Server) -> None:
    def talk() -> str:
        strict: Any = {"_strict_response_validation": True}
        with OpenAI(base_url=server.url, api_key="none", **strict) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
            with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
                final = stream.get_final_completion()
            assert final.choices[0].message.content == whole.choices[0].message.content
            return whole.choices[0].message.content or ""

    assert await asyncio.to_thread(talk) == TEXT


async def test_extensions_go_through_extra_body(server: Server, client: AsyncOpenAI) -> None:
    extra = {"top_k": 3, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9]}
    await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=4, extra_body=extra
    )
    params = server.engine.opened[-1].sampling
    assert (params.top_k, params.min_tokens, params.eos_token_ids) == (3, 2, ())
    assert (params.stop_token_ids, params.max_tokens) == ((9,), 4)


async def test_leaving_a_stream_early(server: Server, client: AsyncOpenAI) -> None:
    server.engine.delay = 0.005
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await server.idle()
    assert len(server.engine.aborted) == 1
