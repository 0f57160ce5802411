"""tool_choice, strict tools and parallel calls: which grammar, which reply, which refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, LengthFinishReasonError, pydantic_function_tool
from pydantic import BaseModel

from moestro.types import Grammar
from tests.fakes import TEMPLATE, byte_tokenizer
from tests.server.asking import refused, sampled
from tests.server.conftest import Make, Server
from tests.server.grammars import Library
from tests.server.test_tools import ARGUMENTS, CALL, QWEN, TOOL, joined

PLAIN = QWEN.replace("</think>", "")
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "other"}}
STRICT: dict[str, Any] = {
    "type": "function",
    "function": {**TOOL["function"], "name": "strict", "strict": True},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
OTHER_CALL = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
STRICT_CALL = CALL.replace("weather", "strict")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(byte_tokenizer())


async def grammar_of(server: Server, **fields: Any) -> Grammar:
    found = (await sampled(server, "chat", **fields)).grammar
    assert found is not None
    return found


CHOICES: list[tuple[dict[str, Any], dict[str, bool]]] = [
    (
        {"tool_choice": "required"},
        {"": False, "Hi": False, CALL: True, OTHER_CALL: True, f"{CALL}\n{OTHER_CALL}": True},
    ),
    (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {CALL: True, f"{CALL}\n{CALL}": False},
    ),
    ({"tool_choice": NAMED}, {CALL: True, OTHER_CALL: False, f"{CALL}\n{CALL}": False}),
    ({"tool_choice": allowed("required", "other")}, {OTHER_CALL: True, CALL: False, "Hi": False}),
    ({"tool_choice": allowed("auto", "other")}, {OTHER_CALL: True, CALL: False, "Hi": True}),
    (
        {"tools": [TOOL, STRICT]},
        {
            "Hi": True,
            CALL: True,
            STRICT_CALL: True,
            CALL.replace("city", "town"): False,
            STRICT_CALL.replace("city", "town"): False,
        },
    ),
    ({"tool_choice": "required", "guided_regex": "[0-9]"}, {CALL: True, "7": False}),
    ({"tools": [STRICT], "guided_regex": "[0-9]"}, {STRICT_CALL: True, "7": True, "Hi": False}),
]


@pytest.mark.parametrize(("fields", "texts"), CHOICES, ids=range(len(CHOICES)))
async def test_what_may_be_written(
    make: Make, library: Library, fields: dict[str, Any], texts: dict[str, bool]
) -> None:
    async with make(CALL, template=PLAIN) as server:
        grammar = await grammar_of(server, **{"tools": [TOOL, OTHER], **fields})
        assert {text: library.accepts(grammar, text) for text in texts} == texts


async def test_no_grammar_where_nothing_asks_for_one(make: Make) -> None:
    async with make("x", template=PLAIN) as server:
        cases: list[dict[str, Any]] = [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}]
        for fields in cases:
            assert (await sampled(server, "chat", tools=[TOOL], **fields)).grammar is None
        fields = {"tools": [STRICT], "tool_choice": "none"}
        assert (await sampled(server, "chat", **fields)).grammar is None


async def test_templates_do_not_see_strict(make: Make) -> None:
    async with make("x", template=PLAIN) as server:
        await sampled(server, "chat", tools=[STRICT])
        ids = list(server.engine.opened[-1].prompt)
        prompt = server.app.state.service.text.tokenizer.decode(ids, skip_special=False)
        assert '"name": "strict"' in prompt
        assert "true" not in prompt


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), (allowed("required", "weather"), "tool_calls"), (NAMED, "stop")],
)
async def test_finish_reasons(make: Make, choice: Any, reason: str) -> None:
    async with make(CALL, template=PLAIN, engine={"per_step": 3}) as server:
        fields = {"tools": [TOOL], "tool_choice": choice}
        found = (await server.chat(**fields)).json()["choices"][0]
        events = await server.chat_events(**fields)
        assert found["finish_reason"] == events.finish() == reason
        message = joined(events.of(0))
        assert message["content"] == ""
        assert found["message"]["content"] is None
        for made in (message, found["message"]):
            (call,) = made["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
        for cut in (40, 50, 60):
            for stream in (False, True):
                limit = {**fields, "max_tokens": cut}
                if stream:
                    events = await server.chat_events(**limit)
                    made, finish = joined(events.of(0)), events.finish()
                else:
                    choice_ = (await server.chat(**limit)).json()["choices"][0]
                    made, finish = choice_["message"], choice_["finish_reason"]
                assert finish == "length"
                for call in made.get("tool_calls", ()):
                    assert ARGUMENTS.startswith(call["function"]["arguments"])
        stopped = (await server.chat(**fields, stop="city")).json()["choices"][0]
        assert stopped["finish_reason"] == "stop"  # the call is not complete


async def test_arguments_come_before_the_call_is_complete(make: Make) -> None:
    async with make(CALL, template=PLAIN, engine={"manual": True}) as server:
        import asyncio

        task = asyncio.create_task(server.chat_events(tools=[TOOL], tool_choice="required"))
        while not server.engine.open_ids:
            await asyncio.sleep(0)
        while server.engine.open_ids:
            server.engine.step()
            await asyncio.sleep(0)
        events = await task
    fragments = [
        call["function"]["arguments"]
        for choice in events.of(0)
        for call in choice["delta"].get("tool_calls", ())
        if "id" not in call
    ]
    assert "".join(fragments) == ARGUMENTS
    assert len(fragments) > 10


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": NAMED, "tools": None}, "tool_choice"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "absent"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tool_choice": allowed("none", "weather")}, "tool_choice.allowed_tools.mode"),
    ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    (
        {"tool_choice": allowed("auto", "weather", "absent")},
        "tool_choice.allowed_tools.tools.1.function.name",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSALS)
async def test_wrong_choices_are_refused(make: Make, fields: dict[str, Any], param: str) -> None:
    async with make("x", template=PLAIN) as server:
        error = await refused(server, "chat", **{"tools": [TOOL], **fields})
        assert error["param"] == param
        assert param in error["message"]


async def test_a_schema_at_fault_is_named(make: Make) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

    def tool(name: str, **fields: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": odd, **fields}}

    async with make("x", template=PLAIN) as server:
        tools = [TOOL, tool("a"), tool("b", strict=True)]
        error = await refused(server, "chat", tools=tools)
        assert error["param"] == "tools.2.function.parameters"
        assert "uniqueItems" in error["message"]
        fields = {"tools": tools[:2], "tool_choice": "required", "guided_json": {"not": {}}}
        assert (await refused(server, "chat", **fields))["param"] == "guided_json"
        await sampled(server, "chat", tools=tools[:2], tool_choice="required")
        await sampled(server, "chat", tools=tools, tool_choice="none")


async def test_tools_without_a_parser_are_refused(make: Make) -> None:
    async with make("x", template=TEMPLATE) as server:
        for choice in ("required", NAMED):
            error = await refused(server, "chat", tools=[TOOL], tool_choice=choice)
            assert error["param"] == "tools"


class City(BaseModel):
    city: str
    wet: bool = False


WROTE = City(city="Bad Tölz 😀").model_dump_json()


@pytest.mark.parametrize("strict", [False, True])
async def test_the_openai_client_parses(listen: Make, strict: bool) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    async with (
        listen(WROTE, engine={"per_step": 3}) as server,
        AsyncOpenAI(
            base_url=server.url, api_key="x", max_retries=0, _strict_response_validation=strict
        ) as client,
    ):
        whole = await client.chat.completions.parse(
            model="tiny", messages=messages, response_format=City, n=2
        )
        assert [choice.message.parsed for choice in whole.choices] == [City(city="Bad Tölz 😀")] * 2
        grammar = server.engine.opened[-1].sampling.grammar
        assert grammar is not None
        assert grammar.kind == "json_schema"
        assert json.loads(grammar.text)["properties"]["city"] == {"title": "City", "type": "string"}
        async with client.chat.completions.stream(
            model="tiny", messages=messages, response_format=City
        ) as stream:
            async for _event in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == City(city="Bad Tölz 😀")
        with pytest.raises(LengthFinishReasonError):
            await client.chat.completions.parse(
                model="tiny", messages=messages, response_format=City, max_tokens=5
            )
        raw = await client.chat.completions.create(
            model="tiny", messages=messages, extra_body={"guided_choice": ["a", "b"]}
        )
        assert raw.choices[0].message.content == WROTE
        assert server.engine.opened[-1].sampling.grammar == Grammar(
            "lark", 'start: CHOICE\nCHOICE: "a" | "b"\n'
        )


async def test_the_openai_client_parses_calls(listen: Make) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    call = f'<tool_call>\n{{"name": "City", "arguments": {WROTE}}}\n</tool_call>'
    async with (
        listen(f"{call}\n{call}", template=PLAIN, engine={"per_step": 3}) as server,
        AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        tools: Any = [pydantic_function_tool(City)]
        choice: Any = {"type": "function", "function": {"name": "City"}}
        for wanted in ("auto", "required", choice):
            whole = await client.chat.completions.parse(
                model="tiny", messages=messages, tools=tools, tool_choice=wanted
            )
            async with client.chat.completions.stream(
                model="tiny", messages=messages, tools=tools, tool_choice=wanted
            ) as stream:
                async for _event in stream:
                    pass
                streamed = await stream.get_final_completion()
            for answer in (whole, streamed):
                calls = answer.choices[0].message.tool_calls or []
                assert [c.function.parsed_arguments for c in calls] == [
                    City(city="Bad Tölz 😀")
                ] * 2
