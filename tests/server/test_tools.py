"""Tools and reasoning through the server, and with the real openai client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer

from moestro.server import tools_choose
from moestro.server.template import ChatTemplate, RenderOptions
from moestro.server.tokenizer import Tokenizer as Wrapped
from tests.fakes import EOS, TEMPLATE, byte_tokenizer, fallback_tokenizer, spelled
from tests.server.asking import refused
from tests.server.conftest import Make, Server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Says it.", "parameters": SCHEMA},
}
QWEN = (
    "{%- if tools %}{%- for t in tools %}{{- t | tojson }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{{- m.role + ':' + (m.content or '') }}"
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function.name }}"
    "{{- c.function.arguments | tojson }}{{- '</tool_call>' }}{%- endfor %}{%- endfor %}"
    "{%- if open %}{{- '<think>\n' }}{%- endif %}{#- </think> #}"
)
HARMONY = "{%- for m in messages %}{{- m.content }}{%- endfor %}{#- tools <|channel|><|message|> #}"
ARGUMENTS = '{"city": "Bad Tölz 😀"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"


def joined(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Deltas put together the way clients do it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        assert delta.get("tool_calls") != []
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append(call)
            else:
                assert set(call["function"]) == {"arguments"}
                last = message["tool_calls"][call["index"]]["function"]
                last["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("per_step", [1, 7, 1000])
@pytest.mark.parametrize("detailed", [False, True])
async def test_case_25_streamed_and_whole(make: Make, per_step: int, detailed: bool) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "n": 2}
    if detailed:
        fields |= {"logprobs": True, "return_token_ids": True}
    async with make(SAID, template=QWEN, engine={"per_step": per_step}) as server:
        body = (await server.chat(**fields)).json()
        events = await server.chat_events(**fields, stream_options={"include_usage": True})
        assert events.usage == body["usage"]
        assert body["usage"]["completion_tokens"] == 2 * (len(SAID.encode()) + 1)
        ids = set()
        for choice in body["choices"]:
            message = choice["message"]
            assert message["content"] == "Let me look."
            assert message["reasoning_content"] == "Hm."
            assert [c["function"]["arguments"] for c in message["tool_calls"]] == [ARGUMENTS] * 2
            ids |= {c["id"] for c in message["tool_calls"]}
            assert choice["finish_reason"] == "tool_calls"
            streamed = events.of(choice["index"])
            assert events.finish(choice["index"]) == "tool_calls"
            found = joined(streamed)
            assert found["content"] == message["content"]
            assert found["reasoning_content"] == message["reasoning_content"]
            functions = [c["function"] for c in message["tool_calls"]]
            assert [c["function"] for c in found["tool_calls"]] == functions
            if detailed:
                tokens = [t for c in streamed for t in c.get("token_ids", ())]
                assert tokens == choice["token_ids"]
                scored = [t for c in streamed if c["logprobs"] for t in c["logprobs"]["content"]]
                assert scored == choice["logprobs"]["content"]
        assert len(ids) == 4


async def test_only_calls_have_null_content(make: Make) -> None:
    async with make(CALL, template=QWEN) as server:
        message = (await server.chat(tools=[TOOL])).json()["choices"][0]["message"]
        assert message["content"] is None
        assert "reasoning_content" not in message
        one = await server.chat(tools=[TOOL], parallel_tool_calls=False)
        assert len(one.json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_choice_none_leaves_the_text_alone(make: Make) -> None:
    async with make(CALL, template=QWEN) as server:
        cases: list[dict[str, Any]] = [{"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {}]
        for fields in cases:
            choice = (await server.chat(**fields)).json()["choices"][0]
            assert choice["message"]["content"] == CALL
            assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_is_text(make: Make) -> None:
    async with make(CALL, template=QWEN) as server:
        for events in (True, False):
            if events:
                streamed = await server.chat_events(tools=[TOOL], max_tokens=30)
                assert (streamed.text(), streamed.finish()) == (CALL[:30], "length")
            else:
                choice = (await server.chat(tools=[TOOL], max_tokens=30)).json()["choices"][0]
                assert choice["message"]["content"] == CALL[:30]
                assert choice["finish_reason"] == "length"


async def test_stop_strings_act_on_what_the_model_wrote(make: Make) -> None:
    async with make(SAID, template=QWEN) as server:
        body = (await server.chat(tools=[TOOL], stop="</tool_call>")).json()
        choice = body["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")
        assert len(choice["message"]["tool_calls"]) == 1
        events = await server.chat_events(tools=[TOOL], stop="Hm")
        assert (joined(events.of(0))["reasoning_content"], events.finish()) == ("", "stop")


async def test_reasoning_options(make: Make) -> None:
    async with make(SAID, template=QWEN) as server:

        async def message(**fields: Any) -> dict[str, Any]:
            found: dict[str, Any] = (await server.chat(**fields)).json()["choices"][0]["message"]
            return found

        rest = SAID.partition("</think>\n\n")[2]
        assert (await message())["content"] == rest
        assert "reasoning_content" not in await message(include_reasoning=False)
        assert (await message(separate_reasoning=False))["content"] == SAID
    settings = {"reasoning_parser": "none"}
    async with make(SAID, template=QWEN, settings=settings) as server:
        assert (await message())["content"] == SAID


async def test_reasoning_that_the_prompt_opened(make: Make) -> None:
    opened = {"chat_template_kwargs": {"open": True}}
    async with make("Hm.\n</think>\n\nYes", template=QWEN) as server:
        message = (await server.chat(**opened)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")
        events = await server.chat_events(**opened)
        assert joined(events.of(0))["reasoning_content"] == "Hm."
        history = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "<think>So "},
        ]
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        body = (await server.chat(messages=history, **fields)).json()
        assert body["choices"][0]["message"]["reasoning_content"] == "Hm."


async def prompt_of(server: Server, **fields: Any) -> str:
    assert (await server.chat(**fields)).status_code == 200
    ids = list(server.engine.opened[-1].prompt)
    return str(server.app.state.service.text.tokenizer.decode(ids, skip_special=False))


async def test_tools_and_calls_reach_the_template(make: Make) -> None:
    history = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "x"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
    ]
    async with make("x", template=QWEN) as server:
        found = await prompt_of(server, messages=history, tools=[TOOL])
        want = 'user:hiassistant:<tool_call>weather{"city": "x"}</tool_call>tool:wet'
        assert found == json.dumps(TOOL) + want
        none = await prompt_of(server, messages=history, tools=[TOOL], tool_choice="none")
        assert none == found
        body = {"messages": history, "tools": [TOOL]}
        ids = (await server.post("/tokenize", body)).json()["tokens"]
        assert ids == list(server.engine.opened[-1].prompt)


def test_arguments_are_text_for_templates_that_want_text() -> None:
    source = (
        "{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
        "{{- c['function']['name'] + ARGS + ';' }}{%- endfor %}{%- endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"a": "ö"}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    for spelled_out in ("c['function']['arguments']", "(c.function.arguments | tojson)"):
        template = ChatTemplate(source.replace("ARGS", spelled_out), {})
        assert template.render(messages, RenderOptions()) == 'f{"a": "ö"};'


def test_reasoning_goes_back_to_harmony() -> None:
    source = "{%- for message in messages %}{{- message.thinking }}|{%- endfor %}"
    call = {"function": {"name": "f"}}
    said: dict[str, Any] = {"role": "assistant", "reasoning_content": "Hm"}
    messages = [
        {**said, "content": "x"},
        {**said, "tool_calls": [call]},
        {**said, "content": "x", "tool_calls": [call]},
        {"role": "user", "content": "x"},
    ]
    assert ChatTemplate(source, {}).render(messages, RenderOptions()) == "Hm|Hm|||"


SCHEMAS: list[Any] = [
    [],
    {"type": "string"},
    {"properties": []},
    {"properties": {"a": {"type": "text"}}},
    {"properties": {"a": {"anyOf": {}}}},
    {"required": "a"},
    {"items": 5},
]
WRONG: list[tuple[Any, str]] = [
    (5, "tools"),
    ([5], "tools.0"),
    ([{"type": "retrieval"}], "tools.0.type"),
    ([{"type": "function"}], "tools.0.function"),
    ([{"type": "function", "function": {"name": "a b"}}], "tools.0.function.name"),
    ([{"type": "function", "function": {"name": "f", "strict": 1}}], "tools.0.function.strict"),
    ([TOOL, TOOL], "tools.1.function.name"),
    ([TOOL] * 1025, "tools"),
    *(
        (
            [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tools.0.function.parameters",
        )
        for schema in SCHEMAS
    ),
]


@pytest.mark.parametrize(("tools", "param"), WRONG)
async def test_wrong_tools_are_refused(make: Make, tools: Any, param: str) -> None:
    async with make("x", template=QWEN) as server:
        error = await refused(server, "chat", tools=tools)
        assert error["param"] == param
        assert param in error["message"]


async def test_tools_that_the_model_cannot_use_are_refused(make: Make) -> None:
    async with make("x", template=TEMPLATE) as server:
        assert (await refused(server, "chat", tools=[TOOL]))["param"] == "tools"
    settings = {"tool_call_parser": "none"}
    async with make("x", template=QWEN, settings=settings) as server:
        assert (await refused(server, "chat", tools=[TOOL]))["param"] == "tools"
        assert (await server.chat(tools=[TOOL], tool_choice="none")).status_code == 200
    async with make("[TOOL_CALLS]f{}", template=QWEN) as server:
        assert "tool_calls" not in (await server.chat(tools=[TOOL])).text
    settings = {"tool_call_parser": "mistral"}
    async with make("[TOOL_CALLS]f{}", template=QWEN, settings=settings) as server:
        (call,) = (await server.chat(tools=[TOOL])).json()["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9
        assert call["id"].isalnum()


SIGNS = [
    ("{{ tools }}<tool_call></think>", "qwen3_moe", "hermes", "think"),
    ("<tool_call><function=", "", "qwen3_coder", "none"),
    ("<tool_call><arg_key>", "", "none", "none"),
    ("[TOOL_CALLS] [THINK]", "", "mistral", "mistral"),
    ("<｜tool▁call▁begin｜></think>", "deepseek_v3", "deepseek", "think"),  # noqa: RUF001
    ("<|channel|><|message|>", "", "harmony", "harmony"),
    ("", "gpt_oss", "harmony", "harmony"),
    ("", "mixtral", "mistral", "none"),
    ("", "deepseek_v2", "deepseek", "none"),
    ("plain", "llama", "none", "none"),
]


@pytest.mark.parametrize(("template", "kind", "tools", "reasoning"), SIGNS)
def test_parsers_are_chosen(template: str, kind: str, tools: str, reasoning: str) -> None:
    assert tools_choose.tool_parser("auto", template, kind) == tools
    assert tools_choose.reasoning_parser("auto", template, kind) == reasoning
    assert tools_choose.tool_parser("hermes", template, kind) == "hermes"


def test_the_model_type_is_read(tmp_path: Path) -> None:
    assert tools_choose.model_type(tmp_path) == ""
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert tools_choose.model_type(tmp_path) == "gpt_oss"
    (tmp_path / "config.json").write_text("[")
    assert tools_choose.model_type(tmp_path) == ""


HARMONY_WORDS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|other|>")


def harmony_tokens(backend: Tokenizer) -> list[int]:
    """An answer whose markers are special tokens, as GPT-OSS has them."""
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in HARMONY_WORDS])
    vocabulary = backend.get_vocab()
    id = vocabulary.__getitem__
    channel, message, end, start = (id(word) for word in HARMONY_WORDS[:4])
    return [
        *(channel, *spelled("analysis"), message, *spelled("Hm"), id("<|other|>"), end),
        *(start, *spelled("assistant"), channel, *spelled("commentary to=functions.weather ")),
        *(id("<|constrain|>"), *spelled("json"), message, *spelled(ARGUMENTS), EOS),
    ]


async def test_markers_that_are_special_tokens(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = byte_tokenizer()
    said = harmony_tokens(backend)
    monkeypatch.setattr("tests.server.conftest.byte_tokenizer", lambda *_a, **_k: backend)
    async with make(said, template=HARMONY, engine={"per_step": 3}) as server:
        choice = (await server.chat(tools=[TOOL])).json()["choices"][0]
        message = choice["message"]
        assert message["reasoning_content"] == "Hm"
        assert message["content"] is None
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
        assert choice["finish_reason"] == "tool_calls"
        assert "Hm" in joined((await server.chat_events()).of(0))["reasoning_content"]


def test_only_the_kept_special_tokens_have_text() -> None:
    backend = fallback_tokenizer(["▁a"])
    backend.add_special_tokens([AddedToken("<k>"), AddedToken("<x>")])
    ids = [backend.get_vocab()[word] for word in ("<k>", "▁a", "<x>", "▁a")]
    keep = frozenset({"<k>", "<absent>"})
    for stream in (False, True):
        tokenizer = Wrapped(backend)
        if stream:
            tokenizer._table = None
        detokenizer = tokenizer.detokenizer(skip_special=True, keep=keep)
        text = detokenizer.push_many(ids) + detokenizer.flush()
        assert text == "<k> a a"
        assert tokenizer.decode(ids, skip_special=True).strip() == "a a"


@pytest.mark.parametrize("strict", [False, True])
async def test_the_openai_client(listen: Make, strict: bool) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    tools: Any = [TOOL]
    async with (
        listen(SAID, template=QWEN, engine={"per_step": 3}) as server,
        AsyncOpenAI(
            base_url=server.url, api_key="x", max_retries=0, _strict_response_validation=strict
        ) as client,
    ):
        answer = await client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, tool_choice="auto"
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        async with client.chat.completions.stream(
            model="tiny", messages=messages, tools=tools, n=2
        ) as stream:
            async for _event in stream:
                pass
            final = await stream.get_final_completion()
        for choice in final.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == message.content == "Let me look."
            assert (choice.message.model_extra or {})["reasoning_content"] == "Hm."
            found = [c.function.arguments for c in choice.message.tool_calls or ()]
            assert found == [ARGUMENTS] * 2
        history = [*messages, message.model_dump(exclude_none=True)]
        history += [
            {"role": "tool", "tool_call_id": c.id, "content": "wet"}
            for c in message.tool_calls or ()
        ]
        again = await client.chat.completions.create(
            model="tiny", messages=history, tools=tools, parallel_tool_calls=False
        )
        assert len(again.choices[0].message.tool_calls or ()) == 1
