"""/v1/messages with the real anthropic client, lax and strict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import Anthropic, AsyncAnthropic

from moestro.server.auth import hash_key
from tests.server.conftest import Server, Setup, on_socket, saying
from tests.server.test_messages import HI, TOOL
from tests.server.test_tools import ARGUMENTS, CALL, QWEN

SAID = f"<think>\nHm 😀.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
FIELDS: Any = {"model": "tiny", "messages": [HI], "tools": [TOOL], "max_tokens": 500}
STRICT: Any = {"_strict_response_validation": True}


def root(server: Server) -> str:
    return server.url.removesuffix("/v1")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    setup = Setup(
        saying(SAID),
        template=QWEN,
        engine={"per_step": 3},
        settings={"api_key_hashes": (hash_key("sesame"),)},
    )
    async with on_socket(setup) as running:
        yield running
        await running.idle()


@pytest_asyncio.fixture(params=[False, True], ids=["lax", "strict"])
async def client(server: Server, request: pytest.FixtureRequest) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(
        base_url=root(server),
        api_key="sesame",
        max_retries=0,
        _strict_response_validation=request.param,
    ) as found:
        yield found


def check(answer: Any) -> None:
    """All of what was said, in the client's own types."""
    thinking, text, *uses = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm 😀.")
    assert text.text == "Let me look."
    assert [use.input for use in uses] == [json.loads(ARGUMENTS)] * 2
    assert {use.name for use in uses} == {"weather"}
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    assert answer.usage.output_tokens == len(SAID.encode()) + 1
    assert answer.usage.cache_read_input_tokens == 3


async def test_create(client: AsyncAnthropic) -> None:
    answer = await client.messages.create(
        **FIELDS,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u"},
        tool_choice={"type": "auto"},
        thinking={"type": "adaptive"},
        stop_sequences=["nothing of it"],
        extra_body={"temperature": 0.5, "top_k": 5},
    )
    check(answer)
    assert answer.model == "tiny"
    assert answer._request_id is not None


async def test_raw_stream(client: AsyncAnthropic) -> None:
    stream = await client.messages.create(**FIELDS, stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(d.text for d in deltas if d.type == "text_delta") == "Let me look."
    assert len([d for d in deltas if d.type == "text_delta"]) > 2


async def test_the_stream_helper(client: AsyncAnthropic) -> None:
    async with client.messages.stream(**FIELDS) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Let me look."
    check(final)
    whole = await client.messages.create(**FIELDS)
    assert final.usage == whole.usage


async def test_a_conversation_goes_on_with_what_came_back(
    server: Server, client: AsyncAnthropic
) -> None:
    first = await client.messages.create(**FIELDS)
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "wet"}
        for block in first.content
        if block.type == "tool_use"
    ]
    history: Any = [
        *(HI, {"role": "assistant", "content": first.content}),
        {"role": "user", "content": results},
    ]
    await client.messages.create(**{**FIELDS, "messages": history})
    ids = list(server.engine.opened[-1].prompt)
    prompt = server.app.state.service.text.tokenizer.decode(ids, skip_special=False)
    calls = f"<tool_call>weather{ARGUMENTS}</tool_call>" * 2
    assert prompt.endswith(f"user:hiassistant:Let me look.{calls}tool:wettool:wet")
    tools = FIELDS["tools"]
    counted = await client.messages.count_tokens(model="tiny", messages=history, tools=tools)
    assert counted.input_tokens == len(ids)


async def test_errors_become_the_right_exceptions(server: Server, client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="'temperature' must be from 0 to 2") as bad:
        await client.messages.create(**FIELDS, extra_body={"temperature": 9})
    assert bad.value.request_id is not None
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**FIELDS, "model": "nope"}, stream=True)
    async with AsyncAnthropic(base_url=root(server), api_key="no", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(**FIELDS)
    bearer = AsyncAnthropic(base_url=root(server), auth_token="sesame", max_retries=0)
    async with bearer as other:
        check(await other.messages.create(**FIELDS))


async def test_the_models(server: Server, client: AsyncAnthropic) -> None:
    listed = [model async for model in client.models.list(limit=1)]
    assert [model.id for model in listed] == ["tiny", "org/tiny"]
    first = await client.models.list()
    assert (first.first_id, first.last_id, first.has_more) == ("tiny", "org/tiny", False)
    back = await client.models.list(before_id="org/tiny")
    assert [model.id for model in back.data] == ["tiny"]
    assert (await client.models.list(lifecycle=["retired"])).data == []
    found = await client.models.retrieve("org/tiny")
    assert found == listed[1]
    assert (found.type, found.display_name, found.lifecycle) == ("model", "org/tiny", "active")
    assert (found.max_input_tokens, found.created_at.year >= 2024) == (4096, True)
    with pytest.raises(anthropic.NotFoundError, match="not served here") as unknown:
        await client.models.retrieve("nope")
    assert unknown.value.request_id is not None
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "nope"}):
        with pytest.raises(anthropic.BadRequestError, match=f"'{next(iter(wrong))}'"):
            await client.models.list(**wrong)  # type: ignore[arg-type]
    async with AsyncAnthropic(base_url=root(server), api_key="no", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError):
            await other.models.list()


async def test_a_failing_stream_raises(server: Server, client: AsyncAnthropic) -> None:
    server.engine.fail_next = "the step failed"
    stream = await client.messages.create(**FIELDS, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        [event async for event in stream]


async def test_retries_follow_the_headers(server: Server) -> None:
    async with AsyncAnthropic(base_url=root(server), api_key="sesame", max_retries=2) as client:
        server.engine.fail_next = "broken"
        with pytest.raises(anthropic.InternalServerError, match="broken"):
            await client.messages.create(**FIELDS)
        assert len(server.engine.opened) == 1


async def test_leaving_a_stream_early(server: Server, client: AsyncAnthropic) -> None:
    server.engine.delay = 0.005
    stream = await client.messages.create(**FIELDS, stream=True, extra_body={"ignore_eos": True})
    async for event in stream:
        if event.type == "content_block_delta":
            break
    await stream.close()
    await server.idle()
    assert len(server.engine.aborted) == 1


async def test_the_blocking_client(server: Server) -> None:
    def talk() -> None:
        with Anthropic(base_url=root(server), api_key="sesame", **STRICT) as client:
            check(client.messages.create(**FIELDS))
            with client.messages.stream(**FIELDS) as stream:
                check(stream.get_final_message())
            counted = client.messages.count_tokens(model="tiny", messages=FIELDS["messages"])
            assert counted.input_tokens == len("user:hi")
            cut = client.messages.create(**{**FIELDS, "max_tokens": 30})
            assert cut.stop_reason == "max_tokens"

    await asyncio.to_thread(talk)
