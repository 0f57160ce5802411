"""Arguments of calls while they are written: any split gives the same, and nothing waits."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.server.answer import AnswerFormat
from moestro.server.tools_deltas import Arguments, Called
from tests.server.test_tools_parsers import MAKE, SEP, B, E, fed, form, harmony, read

BREAKS_OFF = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', '{"a": NaN}', True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', '{"a": "x', False),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x', '{"a": 1', True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}', '{"a": 1]}', False),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [', '{"a": [', False),
    ("deepseek", f'{B}f{SEP}{{"a": <}}{E}', '{"a": <}', True),
    ("deepseek", f'{B}function{SEP}f\n```json\n{{"a": \n```{E}', '{"a": \n```', True),
    ("harmony", harmony("f", '{"a": 1')[:-8], '{"a": 1', False),
    ("harmony", harmony("f", '{"a": 1'), '{"a": 1', True),
    ("qwen3_coder", "<function=f><parameter=n>5</parameter><parameter=s>lon", '{"n": 5', False),
    ("qwen3_coder", "<function=f><parameter=n>5</parameter></fun", '{"n": 5', False),
]


@pytest.mark.parametrize(("parser", "text", "arguments", "complete"), BREAKS_OFF)
def test_arguments_that_break_off_are_told_as_written(
    parser: str, text: str, arguments: str, complete: bool
) -> None:
    found = read(form(parser), text)
    assert found["tool_calls"] == [{"function": {"name": "f", "arguments": arguments}}]
    answer = form(parser).start()
    answer.feed(text)
    answer.finish()
    assert answer.ended_to_call is complete


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8)
    | st.sampled_from(['</tool_call>"', "\\", "}{", "[TOOL_CALLS]", E]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=4), JSON_VALUES, max_size=4
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(MAKE)),
    OBJECTS,
    st.sampled_from([None, 2]),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_arguments_are_streamed_as_they_are_written(
    parser: str, arguments: dict[str, Any], indent: int | None, escaped: bool, cuts: list[int]
) -> None:
    """Any split of the text: the same fragments together, valid JSON, equal to what was meant."""
    wrote = json.dumps(arguments, ensure_ascii=escaped, indent=indent)
    text = MAKE[parser]("f", wrote)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(borders)]
    for split in ([text], list(text), chunks):
        found = fed(form(parser).start(), split)
        assert found == {
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": wrote}}],
        }
    assert json.loads(wrote) == arguments


@pytest.mark.parametrize("parser", [*MAKE, "xml"])
def test_arguments_do_not_wait_for_the_end_of_the_call(parser: str) -> None:
    long = {"s": "x" * 200, "n": 5}
    text = (
        MAKE[parser]("f", json.dumps(long))
        if parser in MAKE
        else (
            f"<function=f><parameter=s>{long['s']}</parameter><parameter=n>5</parameter></function>"
        )
    )
    answer = form("qwen3_coder" if parser == "xml" else parser).start()
    told = ""
    called_at = None
    for i, char in enumerate(text):
        for delta in answer.feed(char):
            if isinstance(delta, Called):
                called_at = i
            elif isinstance(delta, Arguments):
                told += delta.text
        if parser != "xml" and called_at is not None and told and len(told) < len(json.dumps(long)):
            assert text[: i + 1].endswith(told[-1])  # nothing is held back
    answer.finish()
    assert json.loads(told) == long
    assert called_at is not None
    assert called_at < text.index("xxx") + (220 if parser == "xml" else 0)


def test_values_follow_references() -> None:
    schema = {
        "properties": {
            "r": {"$ref": "#/$defs/point"},
            "k": {"enum": [1, 2]},
            "c": {"const": True},
            "t": {"allOf": [{"$ref": "#/$defs/text"}]},
            "odd": {"$ref": "#/$defs/absent"},
        },
        "$defs": {"point": {"type": "object"}, "text": {"type": "string"}},
    }
    made = AnswerFormat(tools="qwen3_coder", callable=True, schemas={"f": schema})
    text = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in {"r": '{"x": 1}', "k": "2", "c": "true", "t": "7", "odd": "7"}.items()
    )
    (call,) = read(made, f"<function=f>\n{text}</function>")["tool_calls"]
    found = json.loads(call["function"]["arguments"])
    assert found == {"r": {"x": 1}, "k": 2, "c": True, "t": "7", "odd": "7"}
