"""Text to calls: every family, every chunking (bug case 25), and what is no call after all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.server.answer import Answer, AnswerFormat
from moestro.server.tools_deltas import Called, Delta
from moestro.server.tools_wire import message_json

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "s": {"type": "string"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    }
}
CB, CE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
B, E, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"  # noqa: RUF001
NASTY = {"a": {"b": []}, "q": 'say "hi" \\ 😀 </tool_call> [TOOL_CALLS] }{', "e": {}}
WROTE = json.dumps(NASTY, ensure_ascii=False)


def form(tools: str = "none", reasoning: str = "none", **fields: Any) -> AnswerFormat:
    return AnswerFormat(
        tools=tools, reasoning=reasoning, schemas=SCHEMAS, **{"callable": True, **fields}
    )


def fed(answer: Answer, chunks: Sequence[str]) -> dict[str, Any]:
    """The message of these chunks, after checking the order of the deltas."""
    deltas: list[Delta] = [delta for chunk in chunks for delta in answer.feed(chunk)]
    deltas += answer.finish()
    started = [d.index for d in deltas if isinstance(d, Called)]
    assert started == list(range(len(started)))
    seen = -1
    for delta in deltas:
        if isinstance(delta, Called):
            assert delta.name
            seen = delta.index
        elif hasattr(delta, "index"):
            assert delta.index == seen
    found = message_json(deltas)
    for call in found.get("tool_calls", ()):
        del call["id"], call["type"]
    del found["role"], found["refusal"]
    return found


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def read(made: AnswerFormat, text: str) -> dict[str, Any]:
    """The message, the same for a few chunkings."""
    whole = fed(made.start(), [text])
    for size in (1, 2, 7):
        assert fed(made.start(), pieces(text, size)) == whole
    return whole


def calls(*made: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"function": {"name": n, "arguments": json.dumps(a, ensure_ascii=False)}} for n, a in made
    ]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def harmony(name: str, arguments: str) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


MAKE = {
    "hermes": hermes,
    "qwen3_coder": hermes,
    "mistral": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{a}",
    "deepseek": lambda n, a: f"{CB}{B}{n}{SEP}{a}{E}{CE}",
    "harmony": harmony,
}


@pytest.mark.parametrize("arguments", [{}, {"a": {"b": []}}, NASTY], ids=["none", "deep", "nasty"])
@pytest.mark.parametrize("parser", MAKE)
def test_case_25_one_call(parser: str, arguments: dict[str, Any]) -> None:
    text = MAKE[parser]("f", json.dumps(arguments, ensure_ascii=False))
    found = read(form(parser), text)
    assert found == {"content": None, "tool_calls": calls(("f", arguments))}


@pytest.mark.parametrize("parser", [p for p in MAKE if p != "harmony"])
def test_case_25_two_calls_after_text(parser: str) -> None:
    make = MAKE[parser]
    text = "Let me see.\n" + make("f", WROTE) + "\n" + make("g", "{}") + "\n"
    both = calls(("f", NASTY), ("g", {}))
    assert read(form(parser), text) == {"content": "Let me see.", "tool_calls": both}
    first = read(form(parser, parallel=False), text)
    assert first == {"content": "Let me see.", "tool_calls": both[:1]}
    assert read(form(parser, callable=False), text) == {"content": text}


OTHER = [
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', ("f", {"a": 1})),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("f", {"a": 1}),
    ),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("f", {"a": 1})),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("f", {})),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"s": "a\nb"}}</tool_call>',
        ("f", {"s": "a\nb"}),
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', ("f", {"a": 1})),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', ("f", {"a": 1})),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', ("f", {"a": 1})),
    (
        "deepseek",
        f'{CB}{B}function{SEP}f\n```json\n{{"a": 1}}\n```{E}{CE}',
        ("f", {"a": 1}),
    ),
    ("deepseek", f'{B}function{SEP}{{"a": 1}}{E}', ("function", {"a": 1})),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', ("f", {"a": 1})),
]


@pytest.mark.parametrize(("parser", "text", "want"), OTHER)
def test_other_spellings(parser: str, text: str, want: tuple[str, Any]) -> None:
    assert read(form(parser), text) == {"content": None, "tool_calls": calls(want)}


def test_a_list_of_calls() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]'
    assert read(form("mistral"), text)["tool_calls"] == calls(("f", {"a": "]"}), ("g", {}))
    cut = read(form("mistral"), text[:-12])
    assert cut["tool_calls"] == calls(("f", {"a": "]"}))
    assert cut["content"].startswith(', {"name": "g"')


def test_values_without_quotes() -> None:
    text = (
        "I call.\n<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n"
        "<parameter=s>\n5\nline </function>\n</parameter>\n<parameter=b>\nTrue\n</parameter>"
        '<parameter=o>{"a": [1]}</parameter>\n<parameter=m>null</parameter>'
        "<parameter=x>7</parameter>\n</function>\n</tool_call>\n<function=g></function>"
    )
    first = {"n": 5, "s": "5\nline </function>", "b": True, "o": {"a": [1]}, "m": None, "x": "7"}
    found = read(form("qwen3_coder"), text)
    assert found == {"content": "I call.", "tool_calls": calls(("f", first), ("g", {}))}
    wrong = "<function=f><parameter=n>five</parameter></function>"
    assert read(form("qwen3_coder"), wrong)["tool_calls"] == calls(("f", {"n": "five"}))


BROKEN = [
    ("hermes", "a <tool_call> b"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {bad}}</tool_call> after'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argu'),
    ("hermes", "text <tool_ca"),
    ("hermes", '<tool_call>{"name": "f"</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 5000 + "]" * 5000),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>5"),
    ("qwen3_coder", "<function=f> what </function>"),
    ("qwen3_coder", "<tool_call><func"),
    ("qwen3_coder", "<tool_call>x"),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("mistral", "[TOOL_CALLS]f[AR"),
    ("deepseek", f"{CB} nothing"),
    ("deepseek", f"{CB}{B[:5]}"),
    ("deepseek", f"{B}f{SEP}nothing"),
    ("deepseek", f"{B}{'f' * 300}{SEP}{{}}"),
]


@pytest.mark.parametrize(("parser", "text"), BROKEN)
def test_what_is_no_call_is_text(parser: str, text: str) -> None:
    assert read(form(parser), text) == {"content": text}


def test_a_call_after_a_broken_one() -> None:
    text = "<tool_call>oops " + hermes("f", "{}")
    assert read(form("hermes"), text) == {
        "content": "<tool_call>oops",
        "tool_calls": calls(("f", {})),
    }


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Looking.<|end|><|start|>assistant" + harmony("f", WROTE)
    )
    assert read(form("harmony", "harmony"), text) == {
        "content": "Looking.",
        "reasoning_content": "Need f.",
        "tool_calls": calls(("f", NASTY)),
    }
    assert read(form("harmony", "none"), text)["content"] == "Need f.Looking."
    shown = read(form("harmony", "harmony", callable=False), text)
    assert shown == {"content": "Looking." + WROTE, "reasoning_content": "Need f."}
    bad = harmony("f", "{nope")
    assert read(form("harmony", "harmony"), bad) == {"content": "{nope"}
    assert read(form("harmony", "harmony"), "<|channel|>final<|message|>Hi <|x")["content"] == (
        "Hi <|x"
    )
    assert read(form("harmony", "harmony"), "<|channel|>fin") == {"content": ""}
    assert read(form("harmony", "harmony"), " to be") == {"content": " to be"}
    assert read(form("harmony", "harmony"), " to=me") == {"content": " to=me"}


def test_reasoning() -> None:
    text = "<think>\nHm,\n\nwell.\n</think>\n\nYes <think> no.\n"
    apart = {"reasoning_content": "Hm,\n\nwell.", "content": "Yes <think> no.\n"}
    assert read(form(reasoning="think"), text) == apart
    assert read(form(reasoning="think"), "\n\n" + text) == apart
    assert read(form(reasoning="think", opened=True), text.removeprefix("<think>")) == apart
    assert read(form(reasoning="think", show_reasoning=False), text) == {
        "content": "Yes <think> no.\n"
    }
    cut = {"reasoning_content": "Hm, </thi", "content": ""}
    assert read(form(reasoning="think"), "<think>Hm, </thi") == cut
    for plain in ("", "\n \nplain", "<thin", "a</think>b", " " * 200 + "<think>"):
        assert read(form(reasoning="think"), plain) == {"content": plain}
    assert read(form(reasoning="mistral"), "[THINK]a[/THINK]b") == {
        "reasoning_content": "a",
        "content": "b",
    }


def test_a_call_inside_the_reasoning_is_reasoning() -> None:
    text = f"<think>Try {hermes('g', '{}')}</think>\n\n{hermes('f', '{}')}"
    assert read(form("hermes", "think"), text) == {
        "reasoning_content": f"Try {hermes('g', '{}')}",
        "content": None,
        "tool_calls": calls(("f", {})),
    }


PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=n>",
        "</parameter>",
    ),
    *("<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", CB, CE, B, E, SEP, "```json"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", " to="),
    *('{"name": "f", "arguments": {}}', "{}", '{"a": "\\"}', "function", "analysis", "final"),
    *(" ", "\n", '"', "{", "}", "[", "]", "<", "\\", "f", "functions.f", "text ", "é😀"),
]
FORMS = [
    form(tools, reasoning, opened=opened)
    for tools in ("none", *MAKE)
    for reasoning, opened in (
        ("none", False),
        ("think", False),
        ("think", True),
        ("harmony", False),
    )
]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.lists(st.sampled_from(PARTS), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_every_chunking_gives_the_same(made: AnswerFormat, text: str, cuts: list[int]) -> None:
    whole = fed(made.start(), [text])
    assert fed(made.start(), list(text)) == whole
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert fed(made.start(), chunks) == whole


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<["))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([f for f in FORMS if not f.opened]), PLAIN)
def test_text_without_markers_passes_soon(made: AnswerFormat, text: str) -> None:
    if text.startswith(" to="):
        return
    answer = made.start()
    told = 0
    for i, char in enumerate(text):
        told += sum(len(getattr(delta, "text", "")) for delta in answer.feed(char))
        assert i + 1 - told <= 64 + 32  # white space and a begun marker
    assert fed(made.start(), [text]) == {"content": text}
