"""/v1/responses on the wire: items in, items and events out, and every refusal by name."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest

from moestro.server.refusals import UnknownKeys
from moestro.server.responses_request import chat_body, names_of
from moestro.server.responses_schema import ResponsesRequest
from moestro.server.schema import validate
from tests.server.conftest import Make, Server
from tests.server.sse import typed
from tests.server.test_tools import ARGUMENTS, CALL, QWEN, SAID, SCHEMA

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "description": "Says it.", "parameters": SCHEMA}
NESTED = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    response = await server.post(PATH, {"input": "hi", **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    response = await server.post(PATH, {"input": "hi", "stream": True, **fields})
    found = typed(response)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def refused(server: Server, **fields: Any) -> dict[str, Any]:
    before = len(server.engine.opened)
    response = await server.post(PATH, {"input": "hi", **fields})
    assert response.status_code == 400, response.text
    assert len(server.engine.opened) == before
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"'{error['param']}" in error["message"]
    return error


async def prompt_of(server: Server, **fields: Any) -> str:
    await ask(server, **fields)
    ids = list(server.engine.opened[-1].prompt)
    return str(server.app.state.service.text.tokenizer.decode(ids, skip_special=False))


async def test_text(make: Make) -> None:
    async with make("Hello!") as server:
        body = await ask(server, metadata={"a": "b"}, user="u", temperature=0.5)
        assert body["id"].startswith("resp_")
        assert server.engine.opened[-1].id.startswith(body["id"])
        assert (body["object"], body["status"], body["model"]) == ("response", "completed", "tiny")
        (item,) = body["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        part = {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
        assert item["content"] == [part]
        usage = body["usage"]
        assert usage["input_tokens"] == len(server.engine.opened[-1].prompt)
        assert (usage["output_tokens"], usage["total_tokens"]) == (7, usage["input_tokens"] + 7)
        assert usage["input_tokens_details"]["cached_tokens"] == 3
        assert usage["output_tokens_details"]["reasoning_tokens"] == 0
        shown = {"metadata": {"a": "b"}, "user": "u", "temperature": 0.5, "store": False}
        assert {key: body[key] for key in shown} == shown
        assert (body["error"], body["incomplete_details"]) == (None, None)


KINDS = [
    *("response.created", "response.in_progress"),
    *("response.output_item.added", "response.content_part.added", "response.reasoning_text.delta"),
    *("response.reasoning_text.done", "response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    *("response.output_item.added", "response.function_call_arguments.delta"),
    *("response.function_call_arguments.done", "response.output_item.done"),
    "response.completed",
]


@pytest.mark.parametrize("per_step", [1, 7, 1000])
async def test_streamed_and_whole_say_the_same(make: Make, per_step: int) -> None:
    async with make(SAID, template=QWEN, engine={"per_step": per_step}) as server:
        whole = await ask(server, tools=[TOOL])
        found = await events(server, tools=[TOOL])
        assert [kind for kind, _ in groupby(event["type"] for event in found)] == KINDS
        begun, last = found[0]["response"], found[-1]["response"]
        assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
        assert begun["id"] == last["id"]
        assert last["usage"] == whole["usage"]
        assert last["usage"]["output_tokens_details"]["reasoning_tokens"] == len("\nHm.\n</think>")
        bare = [[{**item, "id": "", "call_id": ""} for item in r["output"]] for r in (last, whole)]
        assert bare[0] == bare[1]
        assert [item["type"] for item in last["output"]] == [
            *("reasoning", "message", "function_call", "function_call")
        ]
        check_items(found, last["output"])


def check_items(found: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Items begin empty, grow by their deltas, and end as the response has them."""
    for index, item in enumerate(output):
        own = [event for event in found if event.get("output_index") == index]
        assert {e["item_id"] for e in own if "item_id" in e} == {item["id"]}
        first, last = own[0]["item"], own[-1]["item"]
        assert (first["id"], first["status"]) == (item["id"], "in_progress")
        assert last == item
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        if item["type"] == "function_call":
            assert (first["arguments"], text) == ("", ARGUMENTS)
            assert own[-2]["arguments"] == item["arguments"] == ARGUMENTS
        else:
            assert (first["content"], own[1]["part"]["text"]) == ([], "")
            assert text == item["content"][0]["text"] == own[-3]["text"]
            assert own[-2]["part"] == item["content"][0]


async def test_an_answer_of_nothing_is_one_empty_text(make: Make) -> None:
    async with make("") as server:
        (item,) = (await ask(server))["output"]
        assert item["content"][0]["text"] == ""
        found = await events(server)
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("per_step", [1, 1000])
async def test_an_answer_that_is_cut_is_incomplete(make: Make, per_step: int) -> None:
    async with make("abcdef", engine={"per_step": per_step}) as server:
        body = await ask(server, max_output_tokens=4)
        assert (body["status"], body["max_output_tokens"]) == ("incomplete", 4)
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert body["output"][0]["status"] == "incomplete"
        assert body["output"][0]["content"][0]["text"] == "abcd"
        last = (await events(server, max_output_tokens=4))[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_failing_stream_says_what_there_was(listen: Make) -> None:
    async with listen("abc", engine={"manual": True}) as server:
        body = {"input": "hi", "stream": True}
        async with server.client.stream("POST", PATH, json=body) as response:
            lines = response.aiter_lines()
            while "response.in_progress" not in await anext(lines):
                pass  # it is announced before anything was generated
            server.engine.step()
            while "output_text.delta" not in await anext(lines):
                pass
            server.engine.fail_next = "the step failed"
            server.engine.step()
            events = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
        assert events[-1]["type"] == "response.failed"
        found = events[-1]["response"]
        assert found["error"] == {"code": "server_error", "message": "the step failed"}
        assert (found["status"], found["output"][0]["status"]) == ("failed", "incomplete")
        assert found["output"][0]["content"][0]["text"] == "a"


async def test_a_failing_whole_reply_has_a_status(make: Make) -> None:
    async with make("abc") as server:
        server.engine.fail_next = "the step failed"
        response = await server.post(PATH, {"input": "hi"})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the step failed"


HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Dev."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "B", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "x"}'},
    {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c2", "output": "wet"},
    {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "dry"}],
    },
    {"role": "assistant", "content": "So."},
]


async def test_items_become_turns(make: Make) -> None:
    async with make("x", template=QWEN) as server:
        found = await prompt_of(server, input=HISTORY, instructions="Be brief.", tools=[TOOL])
        calls = '<tool_call>weather{"city": "x"}</tool_call><tool_call>weather{}</tool_call>'
        turns = f"system:Be brief.\n\nDev.user:Aassistant:B{calls}tool:wettool:dryassistant:So."
        assert found == json.dumps(NESTED) + turns
        # The same as chat with these messages
        chat = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ]
        assert (await server.chat(messages=chat)).status_code == 200
        asked = server.engine.opened[-1].prompt
        await ask(server, instructions="Be brief.")
        assert server.engine.opened[-1].prompt == asked


REASONED = "{%- for m in messages %}{{- m.role + ':' + (m.content or '') }}{{- m.reasoning }};"
REASONED += "{%- endfor %}{#- <think></think> #}"


async def test_reasoning_comes_back_to_the_model(make: Make) -> None:
    async with make("<think>Hm.</think>Yes", template=REASONED) as server:
        first = await ask(server, include=["reasoning.encrypted_content"])
        reasoning, message = first["output"]
        assert reasoning["content"][0]["text"] == "Hm."
        user = {"role": "user", "content": "A"}
        want = "user:A;assistant:YesHm.;"
        assert await prompt_of(server, input=[user, reasoning, message]) == want
        sealed = {**reasoning, "content": None}
        assert await prompt_of(server, input=[user, sealed, message]) == want
        summary = [{"type": "summary_text", "text": "Hm."}]
        summed = {"type": "reasoning", "summary": summary}
        assert await prompt_of(server, input=[user, summed, message]) == want
        foreign = {**sealed, "encrypted_content": "gAAAA"}
        error = await refused(server, input=[user, foreign, message])
        assert error["param"] == "input.1.encrypted_content"
        plain = await ask(server)
        assert plain["output"][0]["encrypted_content"] is None


async def test_fields_reach_the_engine(make: Make) -> None:
    template = "{{- reasoning_effort }}|{{- enable_thinking }}|{{- messages[0].content }}"
    async with make("x", template=template) as server:
        extensions = {"top_k": 3, "seed": 7, "ignore_eos": True, "stop": ["END"]}
        fields = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 9, **extensions}
        found = await prompt_of(server, reasoning={"effort": "low"}, **fields)
        assert found == "low|True|hi"
        params = server.engine.opened[-1].sampling
        assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 9)
        assert (params.top_k, params.eos_token_ids) == (3, ())
        nulls = dict.fromkeys(("text", "tools", "reasoning", "include", "store", "truncation"))
        await ask(server, **nulls, stream=None, instructions=None)
        harmless = {"store": False, "truncation": "disabled", "background": False}
        await ask(server, **harmless, text={"format": {"type": "text"}}, tools=[])


async def test_tool_choice_and_parallel_calls(make: Make) -> None:
    async with make(CALL + CALL, template=QWEN) as server:
        one = await ask(server, tools=[TOOL], parallel_tool_calls=False)
        assert [item["type"] for item in one["output"]] == ["function_call"]
        assert one["parallel_tool_calls"] is False
        none = await ask(server, tools=[TOOL], tool_choice="none")
        assert none["output"][0]["content"][0]["text"] == CALL + CALL
        assert none["tool_choice"] == "none"


def test_forms_and_choices_are_told_as_chat_tells_them() -> None:
    def chat(**fields: Any) -> dict[str, Any]:
        request = validate(ResponsesRequest, {"input": "hi", **fields})
        return chat_body(request, [], UnknownKeys())

    schema = {"name": "n", "schema": SCHEMA, "strict": True}
    form = chat(text={"format": {"type": "json_schema", **schema}})["response_format"]
    assert form == {"type": "json_schema", "json_schema": schema}
    form = chat(text={"format": {"type": "json_object"}})["response_format"]
    assert form == {"type": "json_object"}
    assert chat(tools=[{**TOOL, "strict": True}])["tools"][0]["function"]["strict"] is True
    assert chat(tools=[TOOL], tool_choice="required")["tool_choice"] == "required"
    choice = chat(tool_choice={"type": "function", "name": "weather"})["tool_choice"]
    assert choice == {"type": "function", "function": {"name": "weather"}}
    names = names_of(["input.0"])
    assert names.of("response_format.json_schema.schema") == "text.format.schema"
    assert names.of("tools.3.function.parameters") == "tools.3.parameters"
    assert names.of("messages.0.content") == "input.0.content"
    assert names.of("messages") == "input"
    assert names.of("messages_of_another_kind") == "messages_of_another_kind"


async def test_logprobs(make: Make) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with make("Hi!") as server:
        part = (await ask(server, **fields))["output"][0]["content"][0]
        assert [entry["token"] for entry in part["logprobs"]] == ["H", "i", "!"]
        assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
        found = await events(server, **fields)
        deltas = [e["logprobs"] for e in found if e["type"] == "response.output_text.delta"]
        assert [entry for each in deltas for entry in each] == part["logprobs"]
        (done,) = [e for e in found if e["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]
        assert (await refused(server, top_logprobs=2))["param"] == "top_logprobs"
    async with make("Hi!", template=QWEN) as server:
        assert (await refused(server, **fields))["param"] == "include"


IMAGE = {"type": "input_image", "image_url": "data:,"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("background", {"background": True}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("store", {"store": True}),
    ("truncation", {"truncation": "auto"}),
    ("context_management", {"context_management": [{"type": "compaction"}]}),
    ("max_tool_calls", {"max_tool_calls": 1}),
    ("include", {"include": ["file_search_call.results"]}),
    ("include", {"include": "x"}),
    ("moderation", {"moderation": {"model": "m"}}),
    ("messages", {"messages": []}),
    ("max_tokens", {"max_tokens": 5}),
    ("response_format", {"response_format": {"type": "text"}}),
    ("logprobs", {"logprobs": True}),
    ("n", {"n": 2}),
    ("continue_final_message", {"continue_final_message": True}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": "9"}),
    ("temperature", {"temperature": 9}),
    ("top_k", {"top_k": "3"}),
    ("reasoning.effort", {"reasoning": {"effort": "huge"}}),
    ("reasoning.effort", {"reasoning": {"effort": 5}}),
    ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("text", {"text": "plain"}),
    ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
    ("metadata", {"metadata": {"a": "b" * 513}}),
    ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ("tools.0.name", {"tools": [{"type": "function"}]}),
    ("tools.0.parameters", {"tools": [{**TOOL, "parameters": 5}]}),
    ("tools.0.defer_loading", {"tools": [{**TOOL, "defer_loading": True}]}),
    ("tool_choice", {"tool_choice": "any"}),
    ("tool_choice.type", {"tool_choice": {"type": "file_search"}}),
    ("tool_choice.name", {"tool_choice": {"type": "function"}}),
    ("input", {"input": None}),
    ("input", {"input": []}),
    ("input.0", {"input": ["x"]}),
    ("input.0.role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input.0.content", {"input": [{"role": "user"}]}),
    ("input.0.content.1.type", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "x"}, IMAGE]}]}),
    ("input.0.content.0.text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
    ("input.0.type", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input.0.type", {"input": [{"type": "web_search_call", "id": "x"}]}),
    ("input.0.call_id", {"input": [
        {"type": "function_call_output", "call_id": "nope", "output": "x"}]}),
    ("input.0.arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields"), REFUSED)
async def test_refusals_name_the_field(make: Make, param: str, fields: dict[str, Any]) -> None:
    async with make("x", template=QWEN) as server:
        for stream in (False, True):
            assert (await refused(server, **fields, stream=stream))["param"] == param


async def test_images_are_named(make: Make) -> None:
    async with make("x") as server:
        error = await refused(server, input=[{"role": "user", "content": [IMAGE]}])
        assert "'input_image'" in error["message"]


async def test_a_long_input_and_the_template_are_told_as_input(make: Make) -> None:
    async with make("x") as server:
        response = await server.post(PATH, {"input": "x" * 5000})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "input")
        assert error["code"] == "context_length_exceeded"
        unknown = await server.post(PATH, {"input": "x", "model": "nope"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    async with make("x", template="{{ raise_exception('No.') }}") as server:
        assert (await server.post(PATH, {"input": "x"})).json()["error"]["param"] == "input"
