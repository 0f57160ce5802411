"""Grammars of calls, family by family: what a model may write is what the parser reads back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import InvalidRequest
from moestro.server.answer import AnswerFormat
from moestro.server.reasoning import THINK
from moestro.server.structured import Constraint
from moestro.server.structured_plan import Plan, grammar_of
from moestro.server.tokenizer import Tokenizer
from moestro.server.tools_choose import HARMONY, TOOL_PARSERS
from moestro.server.tools_families import ARGS, FENCE
from moestro.server.tools_harmony import MARKERS
from moestro.server.tools_request import checked_tools
from moestro.server.tools_rules import Calls, calls_of, choice_of
from moestro.server.tools_wire import message_json
from moestro.types import Grammar
from tests.fakes import byte_tokenizer
from tests.server.grammars import Library

F: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "string", "maxLength": 5},
        "e": {"enum": ["a", 'b "c']},
        "o": {"$ref": "#/$defs/o"},
        "m": {"anyOf": [{"type": "string", "pattern": "^x[0-9]"}, {"type": "null"}]},
    },
    "required": ["n", "e"],
    "additionalProperties": False,
    "$defs": {
        "o": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
G: dict[str, Any] = {
    "type": "object",
    "properties": {"list": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
    "additionalProperties": False,
}
TOOLS = checked_tools(
    [
        {"type": "function", "function": {"name": "f", "parameters": F}},
        {"type": "function", "function": {"name": "f_g", "parameters": G}},
        {"type": "function", "function": {"name": "none"}},
    ]
)
SCHEMAS: dict[str, Any] = {"f": F, "f_g": G, "none": {"maxProperties": 0}}
ARGUMENTS = '{"n": 7, "e": "a"}'
CB, CE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
B, E, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"  # noqa: RUF001
TO = "<|channel|>commentary to=functions."
JSON = " <|constrain|>json<|message|>"

# family and spelling of its template -> one call, two calls
SPELLED: dict[tuple[str, str], tuple[str, str]] = {
    ("hermes", ""): (
        f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>',
    ),
    ("qwen3_coder", ""): (
        "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=e>\na\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=e>\na\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=none>\n</function>\n"
        "</tool_call>",
    ),
    ("mistral", ""): (
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]',
        f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}, '
        '{"name": "none", "arguments": {}}]',
    ),
    ("mistral", ARGS): (
        f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]none[ARGS]{{}}",
    ),
    ("deepseek", ""): (
        f"{CB}{B}f{SEP}{ARGUMENTS}{E}{CE}",
        f"{CB}{B}f{SEP}{ARGUMENTS}{E}{B}none{SEP}{{}}{E}{CE}",
    ),
    ("deepseek", FENCE): (
        f"{CB}{B}function{SEP}f\n```json\n{ARGUMENTS}\n```{E}{CE}",
        f"{CB}{B}function{SEP}f\n```json\n{ARGUMENTS}\n```{E}\n{B}function{SEP}none\n```json\n"
        f"{{}}\n```{E}{CE}",
    ),
    (HARMONY, ""): (f"{TO}f{JSON}{ARGUMENTS}", ""),
}
CASES = [(*case, special) for case in SPELLED for special in (False, True)]


@pytest.fixture(scope="module")
def libraries() -> dict[bool, Library]:
    """Tokenizers that know the markers as text only, and as special tokens."""
    backend = byte_tokenizer()
    words = {word for _, words in TOOL_PARSERS.values() for word in words}
    backend.add_special_tokens(sorted({*words, *MARKERS, THINK.open, THINK.close}))
    return {False: Library(byte_tokenizer()), True: Library(backend)}


def rules(family: str, template: str, choice: Any = "required", **fields: Any) -> Calls:
    options: dict[str, Any] = {"strict": frozenset({"f", "f_g"}), "parallel": True, **fields}
    found = calls_of(choice_of(choice, TOOLS), TOOLS, family=family, template=template, **options)
    assert found is not None
    return found


def grammar(library: Library, calls: Calls, **fields: Any) -> Grammar:
    plan = Plan(calls=calls, harmony=calls.family == HARMONY, **fields)
    return grammar_of(plan, Tokenizer(library.backend).special_id)


def read(calls: Calls, text: str) -> dict[str, Any]:
    """What the server makes of the text; every call must be one of the tools'."""
    form = AnswerFormat(
        tools=calls.family,
        reasoning=HARMONY if calls.family == HARMONY else "think",
        callable=True,
        schemas=SCHEMAS,
    )
    answer = form.start()
    message = message_json(answer.feed(text) + answer.finish())
    for call in message.get("tool_calls", ()):
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    return message


@pytest.mark.parametrize(("family", "template", "special"), CASES)
def test_required(
    libraries: dict[bool, Library], family: str, template: str, special: bool
) -> None:
    library = libraries[special]
    one, two = SPELLED[family, template]
    calls = rules(family, template)
    free = grammar(library, calls)
    single = grammar(library, rules(family, template, parallel=False))
    assert library.accepts(free, one)
    assert library.accepts(single, one)
    assert [c["function"]["arguments"] for c in read(calls, one)["tool_calls"]] == [ARGUMENTS]
    if two:
        assert library.accepts(free, two)
        assert not library.accepts(single, two)
        assert len(read(calls, two)["tool_calls"]) == 2
    for wrong in ("", "text", f"x{one}", one[:-1], one + "x", one.replace("7", "700")):
        assert not library.accepts(free, wrong), wrong
    assert not library.accepts(free, one.replace("f", "unknown", 1))


@pytest.mark.parametrize(("family", "template", "special"), CASES)
def test_named(libraries: dict[bool, Library], family: str, template: str, special: bool) -> None:
    library = libraries[special]
    one, two = SPELLED[family, template]
    named = {"type": "function", "function": {"name": "f"}}
    other = {"type": "function", "function": {"name": "none"}}
    assert library.accepts(grammar(library, rules(family, template, named)), one)
    assert not library.accepts(grammar(library, rules(family, template, named)), two or "x")
    assert not library.accepts(grammar(library, rules(family, template, other)), one)


@pytest.mark.parametrize(("family", "template", "special"), CASES)
def test_strict_calls_within_text(
    libraries: dict[bool, Library], family: str, template: str, special: bool
) -> None:
    library = libraries[special]
    one, two = SPELLED[family, template]
    calls = rules(family, template, "auto")
    free = grammar(library, calls)
    said = "<|channel|>final<|message|>Hi {}" if family == HARMONY else "Hi {}"
    before = "<|channel|>commentary<|message|>Hi<|end|><|start|>assistant"
    for text in (said, one, two, (before if family == HARMONY else "Hi ") + one):
        assert not text or library.accepts(free, text), text
    for wrong in (one.replace("7", "700"), one.replace("f", "unknown", 1), one[:-2]):
        assert not library.accepts(free, wrong), wrong
    if family != HARMONY:
        single = grammar(library, rules(family, template, "auto", parallel=False))
        assert library.accepts(single, "Hi " + one)
        assert not library.accepts(single, two)
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "none"}}],
        },
    }
    only = grammar(library, rules(family, template, allowed, strict=frozenset()))
    assert library.accepts(only, said)
    assert not library.accepts(only, one)


@settings(max_examples=80, deadline=None)
@given(
    case=st.sampled_from(CASES), choice=st.sampled_from(("required", "auto")), seed=st.integers()
)
def test_whatever_is_written_is_read_back(
    libraries: dict[bool, Library], case: tuple[str, str, bool], choice: str, seed: int
) -> None:
    family, template, special = case
    calls = rules(family, template, choice)
    text = libraries[special].written(grammar(libraries[special], calls), seed)
    if text is None:
        return
    message = read(calls, text)
    if choice == "required":
        assert message["tool_calls"]
        assert message["content"] is None


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_and_an_answer_beside_calls(
    libraries: dict[bool, Library], special: bool
) -> None:
    library = libraries[special]
    one, _ = SPELLED["hermes", ""]
    thinking = grammar(library, rules("hermes", ""), marks=THINK)
    for text in (one, f"<think>Hm.</think>\n\n{one}"):
        assert library.accepts(thinking, text)
    assert not library.accepts(thinking, "<think>Hm.</think>")
    opened = grammar(library, rules("hermes", ""), marks=THINK, opened=True)
    assert library.accepts(opened, f"Hm.</think>{one}")
    answer = Constraint("regex", "[0-9]+", "guided_regex")
    either = grammar(library, rules("hermes", "", "auto"), answer=answer)
    assert [library.accepts(either, text) for text in (one, "77", "x", "7" + one)] == (
        [True, True, False, False]
    )
    forced = grammar(library, rules("hermes", ""), answer=answer)
    assert [library.accepts(forced, text) for text in (one, "77")] == [True, False]
    harmony = rules(HARMONY, "", "auto")
    both = grammar(library, harmony, answer=answer)
    call, _ = SPELLED[HARMONY, ""]
    final = "<|channel|>final<|message|>"
    texts = (call, f"{final}77", f"{final}x")
    assert [library.accepts(both, text) for text in texts] == [True, True, False]


def test_without_strict_what_cannot_be_held_to_is_left_out(libraries: dict[bool, Library]) -> None:
    library = libraries[False]
    odd = {
        "type": "object",
        "properties": {"d": {"type": "string", "format": "odd"}},
        "required": ["d"],
        "additionalProperties": False,
        "minProperties": 1,
    }
    tools = checked_tools([{"type": "function", "function": {"name": "f", "parameters": odd}}])
    texts = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"d": "x"}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=d>\nx\n</parameter>\n</function>\n"
        "</tool_call>",
    }
    for family, text in texts.items():
        calls = calls_of(
            choice_of("required", tools),
            tools,
            strict=frozenset(),
            parallel=True,
            family=family,
            template="",
        )
        assert calls is not None
        assert library.accepts(grammar(library, calls), text)


XML_ODD: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"d": {"type": "string", "format": "date"}}}, "format"),
    ({"properties": {"d": {"type": "string", "pattern": "^a|b$"}}}, "pattern"),
    ({"properties": {"a>b": {}}}, "name"),
    ({"properties": {"d": {"const": "x</parameter>"}}}, "</parameter>"),
    ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
    ({"properties": {"d": {"type": "string", "minLength": "5"}}}, "length"),
    ({"properties": {"d": {"type": "string", "pattern": 5}}}, "pattern"),
    (
        {
            "properties": {"d": {"anyOf": [{"$ref": "#/properties/d"}, {"type": "string"}]}},
        },
        "itself",
    ),
]


@pytest.mark.parametrize(("schema", "word"), XML_ODD)
def test_strict_values_without_quotes_are_spelled_or_refused(
    libraries: dict[bool, Library], schema: dict[str, Any], word: str
) -> None:
    raw = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    tools = checked_tools(raw)
    calls = calls_of(
        choice_of("auto", tools),
        tools,
        strict=frozenset({"f"}),
        parallel=True,
        family="qwen3_coder",
        template="",
    )
    assert calls is not None
    with pytest.raises(InvalidRequest, match=r"cannot|has|refers") as caught:
        grammar(libraries[False], calls)
    assert caught.value.param == "tools.0.function.parameters"
    assert word in caught.value.message


STRINGS: list[tuple[Any, str, bool]] = [
    ({"type": "string"}, "any\n<x> }", True),
    ({"type": "string", "minLength": 2}, "é", False),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "é😀\n", True),
    ({"type": "string", "maxLength": 3}, "abcd", False),
    ({"type": "string", "pattern": "b/[0-9]"}, "ab/7c", True),
    ({"type": "string", "pattern": "^b"}, "ab", False),
    ({"type": "string", "pattern": "b$"}, "ab", True),
    ({"type": ["string", "null"], "pattern": "b$"}, "null", True),
    ({"enum": ["x", "y\nz"]}, "y\nz", True),
    ({"enum": ["x", "y\nz"]}, "y", False),
    ({"const": "x"}, "x", True),
    ({"oneOf": [{"const": "x"}, {"const": "z", "title": "Z"}]}, "z", True),
    ({"type": "integer"}, "7", True),
    ({"type": "integer"}, "seven", False),
    ({}, "anything", True),
    (True, "anything", True),
]


@pytest.mark.parametrize(("schema", "value", "fits"), STRINGS)
def test_values_without_quotes(
    libraries: dict[bool, Library], schema: dict[str, Any], value: str, fits: bool
) -> None:
    library = libraries[False]
    whole = {"properties": {"v": schema}, "required": ["v"]}
    tools = checked_tools([{"type": "function", "function": {"name": "f", "parameters": whole}}])
    calls = calls_of(
        choice_of("required", tools),
        tools,
        strict=frozenset({"f"}),
        parallel=True,
        family="qwen3_coder",
        template="",
    )
    assert calls is not None
    text = f"<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>"
    text = f"<tool_call>\n{text}\n</tool_call>"
    assert library.accepts(grammar(library, calls), text) is fits
    if fits:
        form = AnswerFormat(tools="qwen3_coder", callable=True, schemas={"f": whole})
        answer = form.start()
        (call,) = message_json(answer.feed(text) + answer.finish())["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        jsonschema.validate(found, whole)


def test_the_rules_of_one_call_stay_as_they_are() -> None:
    calls = rules("hermes", "")
    assert hash(calls) == hash(replace(calls))
    assert [tool.strict for tool in calls.tools] == [True, True, False]
    assert calls.tools[2].param == "tools.2.function.parameters"
