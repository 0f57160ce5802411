"""The form of an answer: from request fields to exactly one grammar, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer

from moestro.errors import GrammarError
from moestro.types import GRAMMAR_FAULT, Grammar
from tests.fakes import byte_tokenizer
from tests.server.asking import refused, sampled
from tests.server.conftest import Make
from tests.server.grammars import Library

HI = [{"role": "user", "content": "hi"}]
SPACE = {"whitespace_pattern": r"[ ]|\n{1,2}[ \t]{0,40}"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["b"],
    "additionalProperties": False,
}


def written(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def json_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", written({**schema, "x-guidance": SPACE}))


STRICT = json_grammar(SCHEMA)
NAMED = {"name": "it", "schema": SCHEMA}
CHOICE = Grammar("lark", 'start: CHOICE\nCHOICE: "yes" | "n\\"o 😀"\n')
LARK = 'start: "a"+ b\nb: "b"'
GBNF = 'root ::= "a"+ b\nb ::= "b"'
GIVEN: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, json_grammar({"type": "object"})),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, STRICT),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, STRICT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
        STRICT,
    ),
    ({"response_format": {"type": "json_schema", **NAMED}}, STRICT),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, STRICT),
    ({"structured_outputs": {"json": written(SCHEMA)}}, STRICT),
    ({"structured_outputs": {"json_object": True}}, json_grammar({"type": "object"})),
    ({"structured_outputs": {"regex": "a/b|c"}}, Grammar("regex", "a/b|c")),
    ({"structured_outputs": {"choice": ["yes", 'n"o 😀']}}, CHOICE),
    ({"structured_outputs": {"grammar": LARK}}, Grammar("lark", LARK)),
    ({"guided_json": SCHEMA}, STRICT),
    ({"guided_json": written(SCHEMA), "guided_decoding_backend": "auto"}, STRICT),
    ({"guided_json_object": False}, None),
    ({"guided_regex": r"^\d+$"}, Grammar("regex", r"^\d+$")),
    ({"guided_choice": ["yes", 'n"o 😀']}, CHOICE),
    ({"guided_grammar": LARK}, Grammar("lark", LARK)),
    ({"json_schema": written(SCHEMA)}, STRICT),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"grammar": "", "ebnf": " "}, None),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar("regex", "a")),
]


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(byte_tokenizer())


@pytest.mark.parametrize(("fields", "want"), GIVEN, ids=range(len(GIVEN)))
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_fields_become_a_grammar(
    make: Make, path: str, fields: dict[str, Any], want: Grammar | None
) -> None:
    async with make("x") as server:
        assert (await sampled(server, path, **fields)).grammar == want


async def test_gbnf_is_converted(make: Make, library: Library) -> None:
    async with make("x") as server:
        for name in ("guided_grammar", "ebnf", "grammar"):
            grammar = (await sampled(server, **{name: GBNF})).grammar
            assert grammar is not None
            assert [library.accepts(grammar, text) for text in ("aab", "ab", "b", "aa")] == (
                [True, True, False, False]
            )


async def test_every_choice_of_a_call_has_the_grammar(make: Make) -> None:
    async with make("x") as server:
        await sampled(server, guided_regex="x", n=3, prompt=["a", "b"])
        assert [request.sampling.grammar for request in server.engine.opened] == (
            [Grammar("regex", "x")] * 6
        )


async def test_lenient_only_when_asked(make: Make, library: Library) -> None:
    odd = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}

    def form(**fields: Any) -> dict[str, Any]:
        inner = {"name": "x", "schema": odd, **fields}
        return {"response_format": {"type": "json_schema", "json_schema": inner}}

    async with make("x") as server:
        for fields in ({}, {"strict": True}):
            error = await refused(server, "chat", **form(**fields))
            assert error["param"] == "response_format.json_schema.schema"
            assert error["code"] == "invalid_grammar"
            assert "uniqueItems" in error["message"]
        grammar = (await sampled(server, "chat", **form(strict=False))).grammar
        assert grammar is not None
        library(grammar)
        assert [library.accepts(grammar, text) for text in ("[1, 1]", '["a"]')] == [True, False]


def test_white_space_is_bounded(library: Library) -> None:
    nested = json_grammar({"type": "object"})
    pretty = json.dumps({"a": {"b": [1, {"c": None}]}}, indent=4)
    assert library.accepts(nested, pretty)
    assert library.accepts(nested, '{"a":1, "b": {}}')
    for text in (
        '{"a":  1}',
        '{\n\n\n"a": 1}',
        "{ \n}",
        "{}\n",
        " {}",
        "{" + "\n" + " " * 41 + "}",
    ):
        assert not library.accepts(nested, text)
    for seed in range(20):
        found = library.written(STRICT, seed)
        assert found is None or set(json.loads(found)) <= {"a", "b"}


def tags(*more: Any, triggers: Any = ("<f=",)) -> dict[str, Any]:
    structures = [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}, *more]
    return {"response_format": {"type": "structural_tag", "structures": structures,
                                "triggers": list(triggers)}}  # fmt: skip


DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "odd"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.triggers", "1 to 64"),
    (
        {"response_format": {"type": "structural_tag", "format": {}}},
        "response_format.format",
        "not",
    ),
    (tags(triggers=["<x"]), "response_format.structures.0.begin", "one of the triggers"),
    (tags(triggers=["<f=", "<f=a"]), "response_format.structures.0.begin", "not 2"),
    (tags(triggers=["<f=", "<x"]), "response_format.triggers.1", "none of the structures"),
    (tags({"begin": "<f=a>", "schema": {}}), "response_format.structures.1", "'end'"),
    (tags({"begin": "<f=b>", "schema": {"type": "foo"}, "end": ""}), "response_format", "foo"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema",
        "required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
        "response_format.json_schema.name",
        "string",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": []}},
        "response_format.json_schema",
        "object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
        "true or false",
    ),
    (
        {"response_format": {"type": "json_object", "extra": 1}},
        "response_format.extra",
        "supported",
    ),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema", "schema"),
    ({"response_format": "text"}, "response_format", "object"),
    ({"structured_outputs": {}}, "structured_outputs", "choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "JSON"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", ".json'"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
    ({"structural_tag": {}}, "structural_tag", "response_format"),
    ({"guided_json": {"type": "foo"}}, "guided_json", "foo"),
    ({"guided_json": "{"}, "guided_json", "valid JSON"),
    ({"guided_json": "[]"}, "guided_json", "object"),
    ({"guided_json": {"x-guidance": {}}}, "guided_json", "x-guidance"),
    ({"guided_json": {"not": {}}}, "guided_json", '"not"'),
    ({"guided_json": {"$ref": "http://x/y"}}, "guided_json", "http://x/y"),
    ({"guided_json": {"enum": []}}, "guided_json", "empty"),
    ({"guided_json": {"type": "string", "format": "odd"}}, "guided_json", "odd"),
    ({"guided_json": {"description": "x" * 140_000}}, "guided_json", "131072"),
    ({"guided_regex": "("}, "guided_regex", "unclosed"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_regex": "a\\"}, "guided_regex", "backslash"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
    ({"guided_choice": "a"}, "guided_choice", "array"),
    ({"guided_grammar": "start: other"}, "guided_grammar", "other"),
    ({"guided_grammar": "root ::= other"}, "guided_grammar", "other"),
    ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar", "GBNF"),
    ({"ebnf": 'root ::= "' + "a" * 20_000 + '"'}, "ebnf", "16384"),
    ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "bounded"),
    ({"guided_new": "x"}, "guided_new", "not supported"),
    ({"regex": "("}, "regex", "unclosed"),
]


@pytest.mark.parametrize(("fields", "param", "word"), WRONG, ids=[w[1] for w in WRONG])
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_case_33_bad_grammars_are_refused(
    make: Make, path: str, fields: dict[str, Any], param: str, word: str
) -> None:
    async with make("x") as server:
        for stream in (False, True):
            error = await refused(server, path, stream=stream, **fields)
            assert error["param"] == param
            assert param.rpartition(".")[0] in error["message"]
            assert word in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": HI, "regex": "a+"}, "regex"),
        ("/v1/completions", {"prompt": "x", "guided_json": SCHEMA}, "guided_json"),
        ("/v1/responses", {"input": "x", "text": {"format": NAMED | {"type": "json_schema"}}},
         "text.format.schema"),
    ],
)  # fmt: skip
async def test_case_33_a_grammar_that_fails_later_ends_its_request_alone(
    make: Make, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    """It is the request's fault, and said so: no client tries it again."""
    async with make("y" * 20, engine={"manual": True}) as server:
        neighbour = asyncio.create_task(server.complete_events(max_tokens=9))
        asked = asyncio.create_task(server.post(path, {**fields, "stream": stream}))
        while len(server.engine.opened) < 2:
            await asyncio.sleep(0)
        server.engine.step()
        bound = next(r for r in server.engine.opened if r.sampling.grammar is not None)
        server.engine.end(bound.id, GRAMMAR_FAULT + "too many states")
        response = await asked
        while not neighbour.done():
            server.engine.step()
            await asyncio.sleep(0)
        assert (await neighbour).text() == "y" * 9
        assert response.status_code == (200 if stream else 400)
        assert f"'{param}' cannot be followed further: too many states." in response.text
        dialect = stream and path == "/v1/responses"  # which has a list of codes
        assert ("invalid_prompt" if dialect else "invalid_grammar") in response.text
        if not stream:
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_structural_tags_hold_what_begins_like_them(make: Make, library: Library) -> None:
    chars = {"begin": "<f=b>", "schema": {"type": "integer"}, "end": ""}
    turn = {"begin": "<|im_start|>", "schema": {"type": "boolean"}, "end": "!"}  # a special token
    fields = tags(chars, turn, triggers=["<f=", "<|im_start|>"])
    texts = ['plain < f> {"b"', 'so <f=a>{"b": 7}</f> and <f=b>12 <f=b>3', "<|im_start|>true!"]
    wrong = ['<f=a>{"b": "x"}</f>', "<f=c>", "<f=a>x", "<|im_start|>7", "<f=b>x", "<f=a>{}"]
    async with make("x", template=THINKING) as server:
        for path in ("chat", "complete"):
            grammar = (await sampled(server, path, **fields)).grammar
            assert grammar is not None
            assert [library.accepts(grammar, text) for text in texts] == [True] * len(texts)
            assert [library.accepts(grammar, text) for text in wrong] == [False] * len(wrong)
        thought = (await sampled(server, "chat", **fields)).grammar
        assert thought is not None
        assert library.accepts(thought, f"<think>hm 7</think>{texts[1]}")
        as_text = json.dumps(fields["response_format"])
        plain = await sampled(server, "complete", structured_outputs={"structural_tag": as_text})
        assert plain.grammar == grammar


async def test_case_33_deep_and_recursive_schemas(make: Make, library: Library) -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}},
        "additionalProperties": False,
    }
    async with make("x") as server:
        assert (await refused(server, "chat", guided_json=DEEP))["param"] == "guided_json"
        grammar = (await sampled(server, "chat", guided_json=tree)).grammar
        assert grammar is not None
        assert library.accepts(grammar, '{"next": {"next": {}}}')


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_two_at_once_are_refused_by_both_names(make: Make, path: str) -> None:
    fields = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    async with make("x") as server:
        error = await refused(server, path, **fields)
        assert error["param"] == "guided_regex"
        assert "'response_format'" in error["message"]
        assert "'guided_regex'" in error["message"]


class Gate:
    """A check that waits until it may go on, and says how often it was asked."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[str] = []

    def __call__(self, grammar: Grammar) -> None:
        self.asked.append(grammar.text)
        assert self.go.wait(20)
        if grammar.text == "bad":
            raise GrammarError("it is bad")

    def close(self) -> None:
        self.go.set()


async def test_a_grammar_is_checked_once(make: Make) -> None:
    gate = Gate()
    async with make("x", check=gate) as server:
        asked = [asyncio.create_task(server.complete(guided_regex="a")) for _ in range(5)]
        bad = asyncio.create_task(server.complete(guided_regex="bad"))
        while len(gate.asked) < 2:
            await asyncio.sleep(0)
        assert server.engine.opened == []
        assert (await server.complete()).status_code == 200  # others go on meanwhile
        gate.go.set()
        assert [(await task).status_code for task in asked] == [200] * 5
        assert (await bad).json()["error"]["message"] == "'guided_regex': it is bad"
        assert (await server.complete(guided_regex="a")).status_code == 200
        assert sorted(gate.asked) == ["a", "bad"]


async def test_too_many_and_too_slow(make: Make) -> None:
    gate = Gate()
    async with make("x", check=gate) as server:
        grammars = server.app.state.service.grammars
        grammars._waiting, grammars._seconds = 2, 0.05
        first = asyncio.create_task(server.complete(guided_regex="a"))
        second = asyncio.create_task(server.complete(guided_regex="b"))
        while len(gate.asked) < 2:
            await asyncio.sleep(0)
        busy = await server.complete(guided_regex="c")
        assert busy.status_code == 503
        assert busy.json()["error"]["code"] == "queue_full"
        for task in (first, second):
            error = (await task).json()["error"]
            assert error["param"] == "guided_regex"
            assert "0.05 s" in error["message"]
        gate.go.set()
        while grammars._making:
            await asyncio.sleep(0)
        assert (await server.complete(guided_regex="a")).status_code == 200
        assert gate.asked == ["a", "b"]


async def test_who_leaves_while_a_grammar_is_made_leaves_nothing_behind(make: Make) -> None:
    gate = Gate()
    async with make("x", check=gate) as server:
        asked = [asyncio.create_task(server.complete(guided_regex="a")) for _ in range(2)]
        while not gate.asked:
            await asyncio.sleep(0)
        asked[0].cancel()
        await asyncio.gather(asked[0], return_exceptions=True)
        gate.go.set()
        assert (await asked[1]).status_code == 200  # it waited for the same one
        assert len(server.engine.opened) == 1
        assert gate.asked == ["a"]


THINKING = (
    "{%- for m in messages %}{{- m.content }}{%- endfor %}"
    "{%- if end is defined %}{{- end }}{%- endif %}{#- <think></think> #}"
)


async def test_reasoning_comes_before_the_answer(make: Make, library: Library) -> None:
    async def grammar(end: str | None = None, **fields: Any) -> Grammar:
        kwargs = {} if end is None else {"chat_template_kwargs": {"end": end}}
        found = (await sampled(server, "chat", **kwargs, **fields)).grammar
        assert found is not None
        return found

    thoughts = ("hm <x> 12</think>7", "hm</think>\n\n7", "</think>7")
    async with make("x", template=THINKING) as server:
        digit = {"guided_regex": "[0-9]"}
        free = await grammar(**digit)
        for text in ("7", *("<think>" + thought for thought in thoughts)):
            assert library.accepts(free, text)
        for text in ("", "a", "<think>7", "<think></think>", "<think></think>77", "\n\n\n7"):
            assert not library.accepts(free, text)
        begun = await grammar("<think>\n", **digit)
        assert [library.accepts(begun, text) for text in (*thoughts, "7")] == [True] * 3 + [False]
        assert await grammar("<think>\n\n</think>\n\n", **digit) == Grammar("regex", "[0-9]")
        apart = await grammar("<think>\n", separate_reasoning=False, **digit)
        assert apart == begun
        schema = await grammar("<think>\n", guided_json=SCHEMA)
        assert library.accepts(schema, 'so {"b": 5}</think>\n{"b": 7}')
        lark = await grammar("<think>\n", guided_grammar=LARK + '\nc: "}"')
        assert library.accepts(lark, "so</think>aab")
        gbnf = await grammar("<think>\n", guided_grammar=GBNF)
        assert library.accepts(gbnf, "so</think>aab")


HARMONY = "{%- for m in messages %}{{- m.content }}{%- endfor %}{#- <|channel|><|message|> #}"


async def test_harmony_answers_in_its_last_channel(make: Make, library: Library) -> None:
    final = "<|channel|>final<|message|>"
    thought = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
    async with make(f'{thought}{final}{{"b": 7}}', template=HARMONY) as server:
        response = await server.chat(guided_json=SCHEMA)
        grammar = server.engine.opened[-1].sampling.grammar
        assert grammar is not None
        message = response.json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ('{"b": 7}', "Hm {")
    for text in (
        f'{final}{{"b": 7}}',
        f'{thought}{final}{{"b":7}}',
        f'{thought * 2}{final}{{"b":7}}',
    ):
        assert library.accepts(grammar, text)
    for text in ('{"b": 7}', thought, f"{final}7", f'{final}{{"b":7}}<|end|>'):
        assert not library.accepts(grammar, text)


def test_ids_of_special_tokens_are_those_of_the_library() -> None:
    from tokenizers import AddedToken

    from moestro.server.tokenizer import Tokenizer as Wrapped

    backend: Tokenizer = byte_tokenizer()
    names = ["<tool_call>", "[ARGS]", "<a b>", "x>", "<x", "plain"]
    backend.add_tokens([AddedToken(name, special=False) for name in names])
    backend.add_special_tokens(["[THINK]", "odd"])
    config = {"additional_special_tokens": ["[ARGS]"]}  # which the library does not read
    wrapped = Wrapped(backend, None)
    tokens = Library(backend).vocabulary.tokens
    for name in (*names, "[THINK]", "odd", "a", "absent"):
        token = backend.token_to_id(name)
        special = token is not None and tokens.library.is_special_token(token)
        assert wrapped.special_id(name) == (token if special else None), name
    assert Wrapped(backend, config).special_id("[ARGS]") is None
