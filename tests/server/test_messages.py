"""/v1/messages on the wire: blocks in, blocks and events out, errors as Anthropic spells them."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest

from moestro.server.auth import hash_key
from moestro.server.messages_request import chat_body, names_of
from moestro.server.messages_schema import MessagesRequest
from moestro.server.refusals import UnknownKeys
from moestro.server.schema import validate
from tests.server.conftest import Make, Server
from tests.server.sse import typed
from tests.server.test_tools import ARGUMENTS, CALL, QWEN, SAID, SCHEMA

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = {"role": "user", "content": "hi"}
TOOL = {"name": "weather", "description": "Says it.", "input_schema": SCHEMA}
NESTED = {
    "type": "function",
    "function": {"name": "weather", "description": "Says it.", "parameters": SCHEMA},
}


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": [HI], "max_tokens": 500, **fields}


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    response = await server.post(PATH, body_of(fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    return typed(await server.post(PATH, body_of({"stream": True, **fields})))


async def prompt_of(server: Server, **fields: Any) -> str:
    await ask(server, **fields)
    ids = list(server.engine.opened[-1].prompt)
    return str(server.app.state.service.text.tokenizer.decode(ids, skip_special=False))


async def test_text(make: Make) -> None:
    async with make("Hello!") as server:
        response = await server.post(PATH, body_of({"metadata": {"user_id": "u"}}))
        body = response.json()
        assert response.headers["request-id"] == response.headers["x-request-id"]
        assert body["id"].startswith("msg_")
        assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
        assert body["content"] == [{"type": "text", "text": "Hello!"}]
        assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
        usage = body["usage"]
        assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 7)
        assert usage["input_tokens"] == len(server.engine.opened[-1].prompt) - 3


async def test_why_it_stopped(make: Make) -> None:
    async with make("abcdef") as server:
        cut = await ask(server, max_tokens=4)
        assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "abcd")
        stopped = await ask(server, stop_sequences=["zz", "de"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "de")
        assert stopped["content"][0]["text"] == "abc"
        delta = (await events(server, stop_sequences=["de"]))[-2]["delta"]
        assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "de"}


KINDS = [
    *("message_start", "ping"),
    *("content_block_start", "content_block_delta", "content_block_stop") * 4,
    *("message_delta", "message_stop"),
]


@pytest.mark.parametrize("per_step", [1, 7, 1000])
async def test_streamed_and_whole_say_the_same(make: Make, per_step: int) -> None:
    async with make(SAID, template=QWEN, engine={"per_step": per_step}) as server:
        whole = await ask(server, tools=[TOOL])
        found = await events(server, tools=[TOOL])
        assert [kind for kind, _ in groupby(event["type"] for event in found)] == KINDS
        message = found[0]["message"]
        assert (message["content"], message["stop_reason"]) == ([], None)
        prompt = len(server.engine.opened[-1].prompt)
        assert message["usage"]["input_tokens"] == prompt
        assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert found[-2]["usage"] == whole["usage"]
        assert whole["usage"]["output_tokens_details"]["thinking_tokens"] == len("\nHm.\n</think>")
        blocks = put_together(found)
        for block in (*blocks, *whole["content"]):
            block.pop("id", None)
        assert blocks == whole["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        assert (blocks[0]["thinking"], blocks[1]["text"]) == ("Hm.", "Let me look.")
        assert blocks[2]["input"] == json.loads(ARGUMENTS)
        assert blocks[0]["signature"]


def put_together(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks from their events, as clients do it."""
    blocks: list[dict[str, Any]] = []
    written = ""
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            written = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta, block = event["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                written += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            assert blocks[-1]["input"] == {}
            blocks[-1]["input"] = json.loads(written)
    return blocks


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "C", "citations": None},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "wet"},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "is_error": True,
                "content": [{"type": "text", "text": "no", "cache_control": {"type": "ephemeral"}}],
            },
            {"type": "text", "text": "D"},
        ],
    },
]


async def test_blocks_become_turns(make: Make) -> None:
    system = [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]
    async with make("x", template=QWEN) as server:
        found = await prompt_of(server, messages=HISTORY, system=system, tools=[TOOL])
        calls = '<tool_call>weather{"city": "x"}</tool_call><tool_call>weather{}</tool_call>'
        turns = f"system:S\nTuser:A\nBassistant:C{calls}tool:wettool:Error: nouser:D"
        assert found == json.dumps(NESTED) + turns
        counted = await server.post(COUNT, {"messages": HISTORY, "system": system, "tools": [TOOL]})
        assert counted.json() == {"input_tokens": len(server.engine.opened[-1].prompt)}
    template = "{%- for m in messages %}{{- m.reasoning_content }}{%- endfor %}"
    async with make("x", template=template) as server:
        assert await prompt_of(server, messages=HISTORY) == "Hm."


async def test_an_answer_can_be_begun(make: Make) -> None:
    async with make(" four") as server:
        begun = [HI, {"role": "assistant", "content": "Three,"}]
        body = await ask(server, messages=begun)
        assert body["content"][0]["text"] == " four"
        found = await prompt_of(server, messages=begun)
        assert found.endswith("assistant\nThree,")


async def test_fields_reach_the_engine(make: Make) -> None:
    template = "{{- reasoning_effort }}|{{- enable_thinking }}|{{- messages[0].content }}"
    async with make("x", template=template) as server:

        async def told(**fields: Any) -> str:
            return (await prompt_of(server, **fields)).removesuffix("|hi")

        budget = {"type": "enabled", "budget_tokens": 2048}
        assert await told(thinking=budget, max_tokens=3000) == "low|True"
        budget["budget_tokens"] = 5000
        assert await told(thinking=budget, max_tokens=9000) == "medium|True"
        assert await told(thinking={"type": "disabled"}) == "none|False"
        assert await told(thinking={"type": "adaptive"}) == "|"
        assert await told(output_config={"effort": "max"}) == "max|True"
        fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 1, "ignore_eos": True}
        await ask(server, **fields, max_tokens=9)
        params = server.engine.opened[-1].sampling
        assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3)
        assert (params.max_tokens, params.eos_token_ids) == (9, ())
        harmless = {"cache_control": {"type": "ephemeral"}, "service_tier": "auto"}
        nulls = dict.fromkeys(("system", "tools", "thinking", "stop_sequences", "metadata"))
        await ask(server, **harmless, **nulls)


async def test_thinking_can_be_left_out(make: Make) -> None:
    async with make("<think>Hm.</think>Yes", template=QWEN) as server:
        thinking = {"type": "adaptive", "display": "omitted"}
        body = await ask(server, thinking=thinking)
        assert body["content"] == [{"type": "text", "text": "Yes"}]


async def test_tool_choice(make: Make) -> None:
    async with make(CALL + CALL, template=QWEN) as server:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        one = await ask(server, tools=[TOOL], tool_choice=choice)
        assert [block["type"] for block in one["content"]] == ["tool_use"]
        none = await ask(server, tools=[TOOL], tool_choice={"type": "none"})
        assert none["content"] == [{"type": "text", "text": CALL + CALL}]
        assert none["stop_reason"] == "end_turn"


def test_forms_and_choices_are_told_as_chat_tells_them() -> None:
    def chat(**fields: Any) -> dict[str, Any]:
        return chat_body(validate(MessagesRequest, body_of(fields)), [HI], UnknownKeys())

    form = chat(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    schema = {"name": "output", "schema": SCHEMA, "strict": True}
    assert form["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert chat(tools=[{**TOOL, "strict": True}])["tools"][0]["function"]["strict"] is True
    assert chat(tool_choice={"type": "any"})["tool_choice"] == "required"
    choice = chat(tool_choice={"type": "tool", "name": "weather"})
    assert choice["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert choice["parallel_tool_calls"] is True
    names = names_of([])
    assert names.of("response_format.json_schema.schema") == "output_config.format.schema"
    assert names.of("tools.3.function.parameters.x") == "tools.3.input_schema.x"


def blocks(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
USE = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": []}]}),
    ("messages.0.content.0.type", blocks("user", IMAGE)),
    ("messages.0.content.0.type", blocks("user", USE)),
    ("messages.0.content.0.type", blocks("assistant", {"type": "redacted_thinking", "data": "x"})),
    ("messages.0.content.0.text", blocks("user", {"type": "text"})),
    (
        "messages.0.content.0.tool_use_id",
        blocks("user", {"type": "tool_result", "tool_use_id": "nope"}),
    ),
    ("messages.0.content.0.input", blocks("assistant", {**USE, "input": "{}"})),
    ("messages", blocks("assistant", USE)),
    ("system.0.type", {"system": [IMAGE]}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("stop_sequences", {"stop_sequences": "x"}),
    ("temperature", {"temperature": -1}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("thinking.type", {"thinking": {"type": "between_tools"}}),
    ("output_config.effort", {"output_config": {"effort": "huge"}}),
    ("tools.0.type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools.0.input_schema", {"tools": [{"name": "x"}]}),
    ("tools.0.input_schema", {"tools": [{**TOOL, "input_schema": {"type": "array"}}]}),
    ("tools.0.name", {"tools": [{**TOOL, "name": "a b"}]}),
    ("tool_choice.type", {"tool_choice": {"type": "required"}}),
    ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
    ("container", {"container": "c"}),
    ("mcp_servers", {"mcp_servers": [{"type": "url"}]}),
    ("stop", {"stop": "x"}),
    ("n", {"n": 2}),
    ("response_format", {"response_format": {"type": "text"}}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
async def test_refusals_name_the_field(make: Make, param: str, fields: dict[str, Any]) -> None:
    async with make("x", template=QWEN) as server:
        for stream in (False, True):
            response = await server.post(PATH, body_of({**fields, "stream": stream}))
            assert response.status_code == 400, response.text
            body = response.json()
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert body["error"]["message"].startswith(f"'{param}' "), body
        assert server.engine.opened == []


async def test_images_are_named(make: Make) -> None:
    async with make("x") as server:
        response = await server.post(PATH, body_of(blocks("user", IMAGE)))
        assert "'image'" in response.json()["error"]["message"]


async def test_count_tokens_is_what_a_message_takes(make: Make) -> None:
    async with make("x", template=QWEN) as server:
        for fields in ({}, {"system": "S"}, {"tools": [TOOL]}, {"thinking": {"type": "disabled"}}):
            await ask(server, **fields)
            counted = await server.post(COUNT, {"model": "tiny", "messages": [HI], **fields})
            assert counted.json() == {"input_tokens": len(server.engine.opened[-1].prompt)}
        opened = len(server.engine.opened)
        long = await server.post(COUNT, {"messages": [{"role": "user", "content": "x" * 9000}]})
        assert long.json()["input_tokens"] > 9000  # more than fits can be counted
        unknown = await server.post(COUNT, {"model": "nope", "messages": [HI]})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        assert len(server.engine.opened) == opened


async def test_statuses_have_their_types(make: Make) -> None:
    async with make("x", engine={"seats": 0, "max_queued": 0}) as server:

        async def kind(response: Any, status: int) -> str:
            assert response.status_code == status, response.text
            assert response.json()["type"] == "error"
            assert "request-id" in response.headers
            return str(response.json()["error"]["type"])

        full = await server.post(PATH, body_of({}))
        assert await kind(full, 503) == "overloaded_error"
        assert full.headers["retry-after"] == "1"
        unknown = await server.post(PATH, body_of({"model": "nope"}))
        assert await kind(unknown, 404) == "not_found_error"
        assert await kind(await server.post(PATH + "/batches", {}), 404) == "not_found_error"
        assert await kind(await server.client.get(PATH), 405) == "invalid_request_error"
        bad = await server.client.post(PATH, content=b"{")
        assert await kind(bad, 400) == "invalid_request_error"
        long = await server.post(PATH, body_of({"messages": [{**HI, "content": "x" * 5000}]}))
        assert await kind(long, 400) == "invalid_request_error"
        assert long.json()["error"]["message"].startswith("prompt is too long: ")
    async with make("x", settings={"max_request_body": 100}) as server:
        large = await server.post(PATH, body_of({"system": "x" * 100}))
        assert await kind(large, 413) == "request_too_large"


async def test_keys_and_limits(make: Make) -> None:
    settings: dict[str, Any] = {"api_key_hashes": (hash_key("k"),), "rate_limit": 2}
    async with make("x", settings=settings) as server:
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            response = await server.post(PATH, body_of({}), headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k"}):
            version = {"anthropic-version": "2023-06-01"}
            response = await server.post(PATH, body_of({}), headers=headers | version)
            assert response.status_code == 200
        response = await server.post(PATH, body_of({}), headers={"x-api-key": "k"})
        assert response.status_code == 429
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1


async def test_errors_in_a_stream(make: Make) -> None:
    async with make("x") as server:
        server.engine.fail_next = "the step failed"
        found = await events(server)
        assert [event["type"] for event in found] == ["message_start", "ping", "error"]
        assert found[-1]["error"] == {"type": "api_error", "message": "the step failed"}
        server.engine.fail_next = "the step failed"
        whole = await server.post(PATH, body_of({}))
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")
        assert whole.headers["x-should-retry"] == "false"
