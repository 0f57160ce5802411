"""The check at the door: a process of its own, which is ended when a grammar takes too long."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moestro.errors import GrammarError, Unavailable
from moestro.grammar import trial, walk
from moestro.grammar.check import check
from moestro.grammar.compiler import Compiler, compile_grammar
from moestro.grammar.vocabulary import Vocabulary
from moestro.types import Grammar
from tests.grammar.conftest import SIZE, allowed, ids
from tests.oracle import vocabulary as oracle

# Each is let through by the library's own limits, and would compile for hours.
ENDLESS = [
    Grammar("lark", "start: T\nT: " + " & ".join(f"/.*a.{{{n + 1}}}/" for n in range(100))),
    Grammar(
        "json_schema",
        '{"allOf":[' + ",".join(f'{{"type":"string","pattern":".*a.{{{n}}}"}}' for n in range(20))
        + "]}",
    ),
]  # fmt: skip


TWICE = "(a|aa){1000}{1000}b"  # compiles, and has no mask after the first token
BREAKING = [
    Grammar("regex", TWICE),
    Grammar("regex", f"(x|y)*{TWICE}"),
    Grammar("lark", f"start: x x\nx: /{TWICE}/"),
    Grammar("lark", 'start: a~1000 "b"\na: b~1000\nb: "a" | "aa"'),
    Grammar("json_schema", json.dumps({"type": "string", "pattern": f"^{TWICE}$"})),
    Grammar(
        "json_schema",
        json.dumps({"properties": {"x": {"pattern": f"^{TWICE}$", "type": "string"}},
                    "type": "object", "required": ["x"], "additionalProperties": False}),
    ),
]  # fmt: skip


@pytest.mark.parametrize("grammar", BREAKING, ids=range(len(BREAKING)))
def test_one_that_breaks_after_a_few_tokens_is_refused(
    vocabulary: Vocabulary, grammar: Grammar
) -> None:
    with pytest.raises(GrammarError, match=r"cannot be used: (lexer|parser) error: "):
        check(grammar, vocabulary)


def test_one_that_is_slow_at_every_token_is_refused(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_grammar(Grammar("regex", "a{9}b"), vocabulary.tokens)
    assert walk.walk(compiled, vocabulary.tokens) is None
    monkeypatch.setattr(walk, "SLOW", 1e-9)
    assert "for each token" in (walk.walk(compiled, vocabulary.tokens) or "")


def test_good_and_bad_ones_in_one_process(vocabulary: Vocabulary) -> None:
    check(Grammar("regex", "a+"), vocabulary)
    process = vocabulary.trial._process
    assert process is not None
    check(Grammar("json_schema", '{"type":"object"}'), vocabulary)
    check(Grammar("lark", "start: <|im_start|> /x/"), vocabulary)
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed group"):
            check(Grammar("regex", "("), vocabulary)
    assert vocabulary.trial._process is process


def test_what_was_asked_before_is_not_compiled_again(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Grammar("regex", "once"), vocabulary)
    monkeypatch.setattr(trial, "_ask", None)
    check(Grammar("regex", "once"), vocabulary)


@pytest.mark.parametrize("endless", ENDLESS, ids=["lark", "json_schema"])
def test_an_endless_one_is_refused_and_its_process_is_gone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, endless: Grammar
) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 0.3)
    check(Grammar("regex", "warm"), vocabulary)
    process = vocabulary.trial._process
    assert process is not None
    began = time.monotonic()
    with pytest.raises(GrammarError, match=r"over 0\.3 seconds"):
        check(endless, vocabulary)
    assert time.monotonic() - began < 5
    assert process.returncode is not None
    monkeypatch.undo()
    check(Grammar("regex", "after"), vocabulary)


def test_a_process_that_dies_refuses_one_grammar(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Grammar("regex", "alive"), vocabulary)
    assert vocabulary.trial._process is not None
    vocabulary.trial._process.kill()
    with pytest.raises(GrammarError, match="too much for the compiler"):
        check(Grammar("regex", "last"), vocabulary)
    check(Grammar("regex", "last"), vocabulary)


def test_too_many_at_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WAIT_SECONDS", 0.01)
    with vocabulary.trial._lock, pytest.raises(Unavailable):
        check(Grammar("regex", "late"), vocabulary)


def test_threads_take_turns(vocabulary: Vocabulary) -> None:
    grammars = [Grammar("regex", f"t{n % 7}") for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda g: check(g, vocabulary), grammars)) == [None] * 40


def test_the_text_alone_is_too_much(tmp_path: Path) -> None:
    nothing = Vocabulary(tmp_path, size=SIZE, eos_token_ids=())
    with pytest.raises(GrammarError, match="131073 bytes; at most 131072"):
        check(Grammar("regex", "é" * (64 << 10) + "e"), nothing)
    assert nothing.trial._process is None, "nothing was started for it"


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "tokenizer.json"), ("{}", "model"), ("{", "tokenizer"), ("\xff", "tokenizer")],
)
def test_a_checkpoint_without_a_tokenizer_that_can_be_read(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    broken = Vocabulary(tmp_path, size=SIZE, eos_token_ids=(1,))
    with pytest.raises(GrammarError, match=message):
        check(Grammar("regex", "a"), broken)
    with pytest.raises(GrammarError, match=message):
        _ = broken.tokens
    assert broken.trial._process is None


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path: Path) -> None:
    oracle.write(tmp_path, oracle.build(), max_length=64)
    small = Vocabulary(tmp_path, size=100, eos_token_ids=(oracle.EOS,))
    assert small.tokens is small.tokens, "read once"
    matcher, row = Compiler(small).matcher(Grammar("regex", "[A-z]")), np.empty(4, np.int32)
    matcher.mask_into(row)
    assert allowed(row) == {
        token for token in ids("".join(map(chr, range(65, 123)))) if token < 100
    }
