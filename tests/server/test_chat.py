"""Public bug cases E (37-38): messages, templates, tokenize and detokenize."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from moestro.errors import InvalidRequest, ModelError
from moestro.server.conversation import normalise
from moestro.server.template import ChatTemplate, RenderOptions, find_template
from moestro.server.text import Text
from tests.fakes import SPECIAL, TEMPLATE, byte_tokenizer, spelled, write_tokenizer
from tests.server.conftest import Make, Server

USER = {"role": "user", "content": "hi"}
ALTERNATING = (
    "{%- for m in messages %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{{- m['content'] }}{%- endfor %}"
)


async def prompt_of(server: Server, messages: list[Any], **fields: Any) -> str:
    """The text that the template made."""
    response = await server.chat(messages=messages, **fields)
    assert response.status_code == 200, response.text
    ids = server.engine.opened[-1].prompt
    text: str = server.app.state.service.text.tokenizer.decode(ids, skip_special=False)
    return text


async def refused(server: Server, **fields: Any) -> dict[str, Any]:
    response = await server.chat(**fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert (await server.chat()).status_code in (200, 400)
    return error


async def test_case_37_the_templates_own_words(make: Make) -> None:
    async with make("x", template=ALTERNATING) as server:
        error = await refused(server, messages=[USER, USER])
        assert "roles must alternate" in error["message"]
        assert (await server.chat()).status_code == 200


async def test_case_37_a_broken_template(make: Make) -> None:
    async with make("x", template="{% if %}") as server:
        error = await refused(server)
        assert "broken" in error["message"]
        assert "line 1" in error["message"]
        assert (await server.complete()).status_code == 200


async def test_case_37_no_template(make: Make) -> None:
    async with make("x", template=None) as server:
        assert "no chat template" in (await refused(server))["message"]
        assert (await server.complete()).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content.missing.deep }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
    ],
)
async def test_case_37_templates_run_sandboxed_and_bounded(make: Make, template: str) -> None:
    async with make("x", template=template) as server:
        started = time.monotonic()
        error = await refused(server)
        assert time.monotonic() - started < 6
        assert error["param"] == "messages"


async def test_case_37_the_loop_stays_free_while_a_template_runs(make: Make) -> None:
    slow = "{% for a in range(99999) %}{% for b in range(999) %}x{% endfor %}{% endfor %}"
    async with make("x", template=slow) as server:
        task = asyncio.create_task(server.chat())
        while not task.done():
            started = time.monotonic()
            assert (await server.client.get("/health")).status_code == 200
            assert time.monotonic() - started < 0.4
            await asyncio.sleep(0.02)
        assert (await task).status_code == 400


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "wizard", "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role"),
        ([USER, "x"], "messages.1"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": None}], "messages.0.content"),
        ([{"role": "assistant", "tool_calls": 5}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0.function"),
        ("hello", "messages"),
        (None, "messages"),
    ],
)
async def test_case_38_what_is_wrong_with_a_message(make: Make, messages: Any, param: str) -> None:
    async with make("x") as server:
        assert (await refused(server, messages=messages))["param"] == param


async def test_case_38_spellings_of_the_same_text(make: Make) -> None:
    async with make("x") as server:
        spellings = (
            "one two",
            [{"type": "text", "text": "one two"}],
            [{"type": "text", "text": t} for t in ("one", " ", "two")],
        )
        prompts = {
            await prompt_of(server, [{"role": "user", "content": content}]) for content in spellings
        }
        assert prompts == {"<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"}


async def test_case_38_templates_that_want_parts(make: Make) -> None:
    template = (
        "{%- for m in messages %}{%- for part in m.content %}"
        "{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{%- endfor %}"
    )
    async with make("x", template=template) as server:
        for content in ("ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]):
            assert await prompt_of(server, [{"role": "user", "content": content}]) == "ab"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
async def test_case_38_other_parts_are_refused_by_name(make: Make, kind: str) -> None:
    async with make("x") as server:
        part = {"type": kind, kind: {"url": "data:secret"}}
        error = await refused(server, messages=[{"role": "user", "content": [part]}])
        assert error["param"] == "messages.0.content.0.type"
        assert kind in error["message"]
        assert "secret" not in error["message"]


async def test_case_38_tool_calls_in_a_history(make: Make) -> None:
    template = "{{- messages[1].tool_calls[0].function.arguments | tojson }}"
    async with make("x", template=template) as server:
        for given, want in (
            ('{"b": "<é>"}', '{"b": "<é>"}'),
            ({"b": 1}, '{"b": 1}'),
            ("not json", '"not json"'),
            ("", "{}"),
            (None, "{}"),
        ):
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
            history = [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "7"},
            ]
            assert await prompt_of(server, history) == want


async def test_developer_becomes_system_where_the_template_does_not_know_it(make: Make) -> None:
    messages = [{"role": "developer", "content": "d"}, USER]
    async with make("x") as server:
        assert (await prompt_of(server, messages)).startswith("<|im_start|>system\nd")
    async with make("x", template="{# developer #}" + TEMPLATE) as server:
        assert (await prompt_of(server, messages)).startswith("<|im_start|>developer\nd")


async def test_reasoning_goes_back_under_both_names(make: Make) -> None:
    template = "{{- messages[0].reasoning_content + messages[0].reasoning }}"
    async with make("x", template=template) as server:
        for name in ("reasoning_content", "reasoning"):
            assert await prompt_of(server, [{"role": "assistant", name: "r"}]) == "rr"


async def test_bug_m_bos_is_not_doubled(make: Make) -> None:
    async with make("x", template="{{- bos_token + messages[0].content }}", bos=True) as server:
        await server.chat()
        assert server.engine.opened[-1].prompt == (0, *spelled("hi"))
        await server.chat(add_special_tokens=True)
        assert server.engine.opened[-1].prompt == (0, 0, *spelled("hi"))


async def test_the_ends_of_a_prompt(make: Make) -> None:
    history = [USER, {"role": "assistant", "content": "The sky "}]
    async with make("x") as server:
        closed = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe sky <|im_end|>\n"
        assert await prompt_of(server, history, add_generation_prompt=False) == closed
        fields: dict[str, Any] = {
            "add_generation_prompt": False,
            "continue_final_message": True,
        }
        opened = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe sky "
        assert await prompt_of(server, history, **fields) == opened
        error = await refused(server, messages=history, continue_final_message=True)
        assert error["param"] == "continue_final_message"
    async with make("x", template="{{- messages[0].content }}") as server:
        fields["messages"] = history
        assert (await refused(server, **fields))["param"] == "continue_final_message"


async def test_template_variables(make: Make) -> None:
    template = "{{- reasoning_effort }}|{{ enable_thinking }}|{{ a }}|{{ tools is none }}"
    settings = {"chat_template_kwargs": {"a": "server", "enable_thinking": "server"}}
    async with make("x", template=template, settings=settings) as server:
        assert await prompt_of(server, [USER]) == "|server|server|True"
        fields = {"reasoning_effort": "low", "chat_template_kwargs": {"a": "mine"}}
        assert await prompt_of(server, [USER], **fields) == "low|True|mine|True"
        fields["reasoning_effort"] = "none"
        assert await prompt_of(server, [USER], **fields) == "none|False|mine|True"
        error = await refused(server, reasoning_effort="gigantic")
        assert error["param"] == "reasoning_effort"


def render(source: str, messages: list[Any] | None = None, **variables: Any) -> str:
    template = ChatTemplate(source, {"eos_token": "<e>"})
    return template.render(messages or [USER], RenderOptions(variables=variables))


def test_what_templates_may_use() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1, 2] | tojson(indent=1) }}") == "[\n 1,\n 2\n]"
    assert render("{{ eos_token }}") == "<e>"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert render("{{ x }}", x=5) == "5"
    with pytest.raises(InvalidRequest, match=r"^The chat template refused: y{500}\.\.\.$"):
        render("{{ raise_exception('y' * 600) }}")


def test_messages_keep_what_templates_may_read() -> None:
    message = {"role": "user", "content": "x", "name": "n", "custom": 1, "none": None}
    assert normalise([message], developer_role=False) == [
        {"role": "user", "content": "x", "name": "n", "custom": 1}
    ]


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert find_template(tmp_path, {}) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert find_template(tmp_path, {}) == "legacy"
    assert find_template(tmp_path, {"chat_template": "config"}) == "config"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert find_template(tmp_path, {"chat_template": named}) == "d"
    with pytest.raises(ModelError, match="default"):
        find_template(tmp_path, {"chat_template": named[:1]})
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path, {"chat_template": "config"}) == "file"


async def test_a_context_that_is_full_names_the_messages(make: Make) -> None:
    async with make("x") as server:
        error = await refused(server, messages=[{"role": "user", "content": "x" * 5000}])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        # Longer than what the pool for short texts takes.
        error = await refused(server, messages=[{"role": "user", "content": "x" * 200_001}])
        assert error["code"] == "context_length_exceeded"


def test_a_checkpoint_without_a_template_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path, byte_tokenizer())
    with caplog.at_level(logging.WARNING):
        text = Text.from_checkpoint(tmp_path)
        assert "no chat template" in caplog.text
        assert text.template is None
        text.close()
        write_tokenizer(tmp_path, byte_tokenizer(), chat_template="{% if %}")
        text = Text.from_checkpoint(tmp_path)
        assert "broken" in caplog.text
        text.close()


async def test_tokenize_and_detokenize(make: Make) -> None:
    async with make("x", bos=True) as server:
        for root in ("", "/v1"):
            body = (await server.post(f"{root}/tokenize", {"prompt": "hé"})).json()
            assert body["tokens"] == [0, *spelled("hé")]
            assert (body["count"], body["max_model_len"]) == (4, 4096)
            assert body["token_strs"] is None
            back = await server.post(f"{root}/detokenize", {"tokens": body["tokens"]})
            assert back.json() == {"prompt": "<|bos|>hé", "text": "<|bos|>hé"}
        fields = {"prompt": "h", "add_special_tokens": False, "return_token_strs": True}
        body = (await server.post("/tokenize", fields)).json()
        assert (body["tokens"], body["token_strs"]) == (spelled("h"), ["h"])
        body = (await server.post("/tokenize", {"prompt": ["a", "bc"]})).json()
        assert (body["count"], body["tokens"][1]) == ([2, 3], [0, *spelled("bc")])
        body = (await server.post("/tokenize", {"messages": [USER]})).json()
        assert body["tokens"][0] == SPECIAL.index("<|im_start|>")
        empty = (await server.post("/tokenize", {"prompt": "", "add_special_tokens": False})).json()
        assert (empty["count"], empty["tokens"]) == (0, [])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [USER]}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": ["a"] * 1025}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
async def test_tokenize_refusals(make: Make, path: str, body: Any) -> None:
    async with make("x") as server:
        response = await server.post(path, body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]
        assert (await server.post(path, {**body, "model": "nope"})).status_code in (400, 404)
