"""/v1/responses with the real openai client, lax and strict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from tests.server.conftest import Server, Setup, on_socket, saying
from tests.server.test_responses import TOOL
from tests.server.test_tools import ARGUMENTS, CALL, QWEN

SAID = f"<think>\nHm 😀.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
FIELDS: Any = {"model": "tiny", "input": "hi", "tools": [TOOL]}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    setup = Setup(saying(SAID), template=QWEN, engine={"per_step": 3})
    async with on_socket(setup) as running:
        yield running
        await running.idle()


def check(answer: Any) -> None:
    """All of what was said, in the client's own types."""
    reasoning, message, *calls = answer.output
    assert reasoning.content[0].text == "Hm 😀."
    assert answer.output_text == message.content[0].text == "Let me look."
    assert [call.arguments for call in calls] == [ARGUMENTS] * 2
    assert {call.name for call in calls} == {"weather"}
    assert answer.status == "completed"
    assert answer.usage.output_tokens == len(SAID.encode()) + 1
    assert answer.usage.output_tokens_details.reasoning_tokens == len("\nHm 😀.\n</think>".encode())


async def test_create(client: AsyncOpenAI) -> None:
    answer = await client.responses.create(
        **FIELDS,
        instructions="Be brief.",
        metadata={"a": "b"},
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "text"}},
        tool_choice="auto",
        store=False,
        include=["reasoning.encrypted_content"],
    )
    check(answer)
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "low"


async def test_a_conversation_goes_on_with_what_came_back(
    server: Server, client: AsyncOpenAI
) -> None:
    first = await client.responses.create(**FIELDS)
    items: Any = [{"role": "user", "content": "hi"}, *first.output]
    for call in first.output:
        if call.type == "function_call":
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
            items.append(output)
    await client.responses.create(**{**FIELDS, "input": items})
    ids = list(server.engine.opened[-1].prompt)
    prompt = server.app.state.service.text.tokenizer.decode(ids, skip_special=False)
    calls = f"<tool_call>weather{ARGUMENTS}</tool_call>" * 2
    assert prompt.endswith(f"user:hiassistant:Let me look.{calls}tool:wettool:wet")


async def test_raw_stream(client: AsyncOpenAI) -> None:
    stream = await client.responses.create(**FIELDS, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "Let me look."
    thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert thought == "Hm 😀."
    assert events[-1].type == "response.completed"
    check(events[-1].response)


async def test_the_stream_helper(client: AsyncOpenAI) -> None:
    async with client.responses.stream(**FIELDS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
    assert snapshots[-1] == "Let me look."
    assert len(snapshots) > 2
    check(final)


async def test_parse(client: AsyncOpenAI) -> None:
    parsed = await client.responses.parse(**FIELDS)
    check(parsed)
    assert parsed.output_parsed is None


async def test_errors_become_the_right_exceptions(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.responses.create(**FIELDS, previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nope", input="hi", stream=True)
    with pytest.raises(openai.NotFoundError, match="No such route"):
        await client.responses.retrieve("resp_1")


async def test_a_failing_stream(server: Server, client: AsyncOpenAI) -> None:
    server.engine.fail_next = "the step failed"
    stream = await client.responses.create(**FIELDS, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress", "response.failed")
    ]
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "the step failed"


async def test_leaving_a_stream_early(server: Server, client: AsyncOpenAI) -> None:
    server.engine.delay = 0.005
    stream = await client.responses.create(**FIELDS, stream=True, extra_body={"ignore_eos": True})
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await server.idle()
    assert len(server.engine.aborted) == 1


async def test_the_blocking_client(server: Server) -> None:
    def talk() -> None:
        strict: Any = {"_strict_response_validation": True}
        with OpenAI(base_url=server.url, api_key="none", **strict) as client:
            check(client.responses.create(**FIELDS))
            with client.responses.stream(**FIELDS) as stream:
                check(stream.get_final_response())
            cut = client.responses.create(**FIELDS, max_output_tokens=30)
            assert cut.incomplete_details is not None
            assert cut.incomplete_details.reason == "max_output_tokens"

    await asyncio.to_thread(talk)


async def test_logprobs_pass_strict_validation() -> None:
    setup = Setup(saying("Hi!"))
    async with (
        on_socket(setup) as plain,
        AsyncOpenAI(base_url=plain.url, api_key="none", _strict_response_validation=True) as client,
    ):
        answer = await client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
        message: Any = answer.output[0]
        logprobs = message.content[0].logprobs
        assert [entry.token for entry in logprobs] == ["H", "i", "!"]
        assert json.loads(answer.to_json())["text"]["format"] == {"type": "text"}
