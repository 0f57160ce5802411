"""The demo model held to grammars over HTTP: all that it writes is what was asked for.

It is a tiny model that was never trained on any of this, so without grammars it fails all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.oracle.serving import Served, serve

TEMPLATE = (
    "{%- for t in tools or [] %}{{- t | tojson }}{%- endfor %}{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{%- endfor %}"
    "{{- '<|im_start|>assistant\n<think>\n' }}"
    "{%- if not think %}{{- '\n</think>\n\n' }}{%- endif %}"
    "{#- <tool_call> #}"
)
MESSAGES: Any = [{"role": "user", "content": "What is 17 + 25?"}]
HOT: Any = {"model": "demo", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 300}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "person", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "place", "parameters": PLACE}},
]
PARAMETERS = {"person": SCHEMA, "place": PLACE}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("structured")
    template = Path(folder, "template.jinja")
    template.write_text(TEMPLATE)
    flags = ("--served-model-name", "demo", "--chat-template", str(template))
    with serve("", *flags, log=folder / "server.log") as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client
    served.wait_idle()


def valid(text: str | None) -> bool:
    jsonschema.validate(json.loads(text or ""), SCHEMA)
    return True


FORMS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"response_format": FORMAT}, valid),
    ({"extra_body": {"guided_json": SCHEMA}}, valid),
    (
        {"extra_body": {"structured_outputs": {"regex": r"[a-f]{4}-\d{2}"}}},
        re.compile(r"[a-f]{4}-[0-9]{2}").fullmatch,
    ),
    (
        {"extra_body": {"guided_choice": ["yes", "no", "maybe"]}},
        ("yes", "no", "maybe").__contains__,
    ),
    (
        {"extra_body": {"guided_grammar": 'root ::= "<" d d? ">"\nd ::= [0-9]'}},
        re.compile("<[0-9]{1,2}>").fullmatch,
    ),
]


@pytest.mark.parametrize(("fields", "fits"), FORMS, ids=range(len(FORMS)))
def test_every_answer_fits(
    client: openai.OpenAI, fields: dict[str, Any], fits: Callable[[str], Any]
) -> None:
    answer = client.chat.completions.create(**HOT, **fields, n=2, seed=1)
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**HOT, **fields, n=2, seed=1, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    texts = [choice.message.content or "" for choice in answer.choices]
    assert streamed == texts  # the same seed
    assert all(fits(text) for text in texts)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    if "response_format" not in fields:
        plain = client.completions.create(
            model="demo", prompt="1 + 1 =", max_tokens=300, temperature=1.0, **fields
        )
        assert fits(plain.choices[0].text)


def test_many_at_once_all_validate(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(**HOT, response_format=FORMAT, seed=seed)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(16)))
    assert all(valid(text) for text in texts)
    assert len(set(texts)) > 3


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "place"}}]
)
def test_calls_are_made_when_they_must_be(client: openai.OpenAI, choice: Any) -> None:
    fields: Any = {**HOT, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**fields, n=2, seed=3)
    told = []
    for made in answer.choices:
        assert made.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert made.message.content is None
        (call,) = made.message.tool_calls or ()
        assert call.type == "function"
        assert choice == "required" or call.function.name == "place"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        told.append(call.function.arguments)
    arguments = ["", ""]
    for chunk in client.chat.completions.create(**fields, n=2, seed=3, stream=True):
        for part in chunk.choices:
            for delta in part.delta.tool_calls or ():
                assert delta.function is not None
                arguments[part.index] += delta.function.arguments or ""
    assert arguments == told


def test_reasoning_is_free_and_the_answer_is_not(client: openai.OpenAI) -> None:
    kwargs = {"chat_template_kwargs": {"think": True}}
    fields: Any = {**HOT, "max_tokens": 80, "extra_body": {**kwargs, "guided_choice": ["yes"]}}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].message.content in ("", "yes")
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens


def test_cut_answers_and_stop_strings(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(**{**HOT, "max_tokens": 9}, response_format=FORMAT)
    assert cut.choices[0].finish_reason == "length"
    assert (cut.choices[0].message.content or "").startswith("{")
    stopped = client.chat.completions.create(**HOT, response_format=FORMAT, stop='"age"')
    assert stopped.choices[0].finish_reason == "stop"
    assert '"age"' not in (stopped.choices[0].message.content or "")


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def test_the_openai_client_parses(client: openai.OpenAI) -> None:
    fields: Any = {**HOT, "response_format": Person}
    parsed = client.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(parsed, Person)
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


def test_case_33_bad_grammars_cost_nothing(served: Served, client: openai.OpenAI) -> None:
    before = served.stats()["scheduler"]["prompt_tokens"]
    bad: list[dict[str, Any]] = [
        {"guided_regex": "("},
        {"guided_json": {"type": "foo"}},
        {"guided_json": {"enum": []}},
        {"guided_grammar": "start: start start"},
    ]
    for fields in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**HOT, extra_body=fields)
        assert caught.value.param == next(iter(fields))
    assert served.stats()["scheduler"]["prompt_tokens"] == before
