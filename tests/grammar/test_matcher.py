"""Masks, token by token, against grammars small enough to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

import pytest
from llguidance import LLMatcher, LLParserLimits

from moestro.errors import GrammarError
from moestro.grammar.compiler import MOST_KEPT, Compiler
from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import Vocabulary
from moestro.types import Grammar
from tests.grammar.conftest import PIECES, SIZE, TEXT, ids, mask
from tests.oracle.vocabulary import EOS, PAD

Make = Callable[..., Matcher]


def test_the_mask_is_what_the_expression_allows(make: Make) -> None:
    matcher = make("regex", "a(b|cd)?")
    assert mask(matcher) == {*ids("a"), TEXT.id(b"ab")}
    assert not matcher.may_end
    assert matcher.accept(ids("a")[0])
    assert mask(matcher) == {*ids("bc"), EOS}
    assert (matcher.may_end, matcher.finished) == (True, False)
    assert not matcher.accept(ids("d")[0])
    assert mask(matcher) == {*ids("bc"), EOS}, "a refused token changes nothing"
    assert matcher.accept(ids("c")[0])
    assert mask(matcher) == set(ids("d"))
    assert matcher.accept(ids("d")[0])
    assert mask(matcher) == {EOS}
    assert matcher.finished
    assert matcher.count == 3


def test_ids_without_a_token_are_never_allowed(make: Make) -> None:
    anything = mask(make("lark", r"start: /(.|\n)*/"))
    assert {EOS, *ids("a\n{")} <= anything
    assert max(anything) < len(TEXT) < SIZE
    assert PAD not in anything
    assert mask(make("lark", "start: <[*]>")) == set(range(len(TEXT)))
    assert mask(make("lark", f"start: <[{len(TEXT)}]>")) == set()


def test_going_back_and_on_again(make: Make) -> None:
    """A random walk with steps back has the masks of the straight way."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    text = ids(json.dumps({"a": "yy", "more": [1, None, {"b": "é"}]}, ensure_ascii=False))
    straight = make("json_schema", json.dumps(schema))
    masks = []
    for token in text:
        masks.append(mask(straight))
        assert straight.accept(token)
    assert straight.finished
    matcher, random = make("json_schema", json.dumps(schema)), Random(1)
    for _ in range(200):
        to = random.randrange(len(text))
        matcher.rewind(min(to, matcher.count))
        while matcher.count < to:
            assert matcher.accept(text[matcher.count])
        assert mask(matcher) == masks[to]


def test_going_back_from_the_end(make: Make) -> None:
    matcher = make("regex", "ab?")
    assert all(map(matcher.accept, ids("ab")))
    assert matcher.finished
    matcher.rewind(1)
    assert mask(matcher) == {*ids("b"), EOS}
    matcher.rewind(0)
    assert mask(matcher) == {*ids("a"), TEXT.id(b"ab")}


def test_matchers_of_one_grammar_go_their_own_ways(make: Make) -> None:
    one, other = make("regex", "(a|b)c"), make("regex", "(a|b)c")
    assert one.accept(ids("a")[0])
    assert mask(one) == set(ids("c"))
    assert mask(other) == set(ids("ab"))


def test_a_token_of_several_bytes_may_cross_the_borders_of_rules(make: Make) -> None:
    schema = '{"type":"object","properties":{"k":{"type":"object"}},"required":["k"]}'
    matcher = make("json_schema", schema)
    assert all(map(matcher.accept, ids('{"k')))
    assert TEXT.id(PIECES[0]) in mask(matcher)
    assert matcher.accept(TEXT.id(PIECES[0]))
    assert matcher.accept(ids("{")[0])
    assert TEXT.id(PIECES[2]) in mask(matcher)
    assert matcher.accept(TEXT.id(PIECES[2]))
    assert matcher.finished


def test_spaces_come_to_an_end(make: Make) -> None:
    matcher, space = make("json_schema", '{"type":"object"}'), ids(" ")[0]
    assert matcher.accept(ids("{")[0])
    spaces = 0
    while matcher.accept(space):
        spaces += 1
    assert spaces == 64
    assert ids("}")[0] in mask(matcher)


def test_a_grammar_that_gets_too_large_on_the_way(vocabulary: Vocabulary) -> None:
    """The library's limit on states: the matcher says so, and nothing is allowed any more."""
    tokens, limits = vocabulary.tokens, LLParserLimits(max_lexer_states=40)
    source = LLMatcher.grammar_from_regex("([ab]*a[ab]{40}|[ab]*b[ab]{50}c)*")
    matcher = Matcher(LLMatcher(tokens.library, source, log_level=0, limits=limits), tokens)
    for count in range(100):
        row = mask(matcher)
        if matcher.fault is not None:
            break
        assert matcher.accept(ids("ab")[count % 3 == 0])
    assert matcher.fault == "lexer error: too many states: 40 >= 40"
    assert row == set()
    assert not matcher.may_end
    assert not matcher.finished
    assert not matcher.accept(ids("a")[0])


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-ahead"),
        ("json_schema", "{", "EOF"),
        ("json_schema", "[]", "object"),
        ("json_schema", '{"type":"foo"}', "Invalid type: foo"),
        ("json_schema", '{"enum":[]}', "empty"),
        ("json_schema", '{"not":{}}', "not"),
        ("json_schema", '{"x-guidance":{"lenient":true},"not":{}}', "not"),
        ("json_schema", '{"$ref":"#"}', "no text matches it"),
        ("json_schema", '{"$ref":"http://127.0.0.1/x"}', "127.0.0.1"),
        ("json_schema", '{"items":' * 300 + "{}" + "}" * 300, "recursion limit"),
        ("json_schema", "\ud800", "JSON"),
        ("lark", "start: x", "unknown name"),
        ("lark", "start: <|nobody|>", "unknown special token"),
        ("regex", "a" * (200 << 10), "204800 bytes; at most 131072"),
    ],
)
def test_what_cannot_be_compiled(vocabulary: Vocabulary, kind: str, text: str, words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        Compiler(vocabulary).matcher(Grammar(kind, text))  # type: ignore[arg-type]
    assert words in caught.value.message
    assert len(caught.value.message) < 400
    assert (caught.value.status, caught.value.code) == (400, "invalid_grammar")


def test_few_compiled_grammars_are_kept(vocabulary: Vocabulary) -> None:
    compiler = Compiler(vocabulary)
    for number in range(MOST_KEPT + 5):
        compiler.matcher(Grammar("regex", f"x{number}"))
    compiler.matcher(Grammar("regex", "x5"))
    compiler.matcher(Grammar("regex", "new"))
    kept = [grammar.text for grammar in compiler._kept]
    assert len(kept) == MOST_KEPT
    assert kept[-2:] == ["x5", "new"]
    assert "x6" not in kept
