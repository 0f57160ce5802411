"""What may end a sequence that has a grammar, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moestro.grammar.constraint import NO_TOKEN, REFUSED, Constraint
from moestro.grammar.matcher import Matcher
from moestro.types import GRAMMAR_FAULT, SamplingParams
from tests.grammar.conftest import SIZE, TEXT, allowed, blank, ids
from tests.oracle.vocabulary import EOS, TURN

Make = Callable[..., Matcher]
A, B, C = ids("abc")
ALL = set(range(-(-SIZE // 32) * 32))


class Walk:
    """A constraint, and the tokens that went through it."""

    def __init__(self, matcher: Matcher, **sampling: Any) -> None:
        params = SamplingParams(**({"max_tokens": 99, "eos_token_ids": (EOS,)} | sampling))
        self.constraint = Constraint(matcher, params)
        self.index = 0

    def may(self) -> set[int]:
        row = blank()
        fault = self.constraint.allow_into(row, self.index)
        assert fault is None, fault
        return allowed(row)

    def say(self, *tokens: int) -> Walk:
        for token in tokens:
            assert token in self.may()
            self.constraint.record(token, self.index)
            self.index += 1
        return self


def test_eos_where_the_grammar_may_end_and_alone_where_it_must(make: Make) -> None:
    walk = Walk(make("regex", "ac?"))
    assert EOS not in walk.may()
    assert walk.say(A).may() == {C, EOS}
    assert walk.say(C).may() == {EOS}
    assert not walk.constraint.complete, "it has a token to say so"
    walk.say(EOS)
    assert walk.may() == ALL, "what comes after the end is nobody's"


def test_without_eos_it_is_complete_with_its_last_token(make: Make) -> None:
    walk = Walk(make("regex", "ac?"), eos_token_ids=())
    walk.say(A)
    assert walk.may() == {C}, "EOS, which is to be ignored, is no way out"
    assert not walk.constraint.complete
    walk.say(C)
    assert walk.constraint.complete


def test_a_stop_token_ends_only_what_may_end(make: Make) -> None:
    walk = Walk(make("regex", "[ab]c"), stop_token_ids=(B, TURN))
    assert walk.may() == {A}
    walk.say(A, C)
    assert walk.may() == {EOS, B, TURN}


def test_an_end_that_the_grammar_asks_for_itself(make: Make) -> None:
    walk = Walk(make("lark", "start: /a/ <|im_start|>"), stop_token_ids=(TURN,))
    assert walk.may() == {A}
    assert walk.say(A).may() == {TURN}
    walk.say(TURN)
    inside = Walk(make("lark", "start: /a/ <|im_start|> /b/"), stop_token_ids=(TURN,))
    inside.say(A)
    fault = inside.constraint.allow_into(blank(), 1)
    assert fault == GRAMMAR_FAULT + NO_TOKEN, "it would end too early"


def test_min_tokens_until_nothing_else_is_allowed(make: Make) -> None:
    walk = Walk(make("regex", "a{1,3}"), min_tokens=2)
    assert EOS not in walk.say(A).may()
    assert EOS in walk.say(A).may()
    short = Walk(make("regex", "ac"), min_tokens=9)
    assert short.say(A, C).may() == {EOS}, "it gives way"


def test_a_dead_grammar_says_so_and_allows_all(make: Make) -> None:
    walk = Walk(make("lark", f"start: /a/ <[{len(TEXT)}]>"))  # the model has no such token
    walk.say(A)
    row = blank()
    assert walk.constraint.allow_into(row, 1) == GRAMMAR_FAULT + NO_TOKEN
    assert allowed(row) == ALL


def test_recording_twice_and_taking_back(make: Make) -> None:
    walk = Walk(make("regex", "(ab|ac)+"))
    walk.say(A)
    walk.constraint.record(A, 0)
    assert walk.may() == {B, C}
    walk.say(C, A)
    walk.index = 1  # two tokens were never told to anybody, and are sampled again
    assert walk.may() == {B, C}
    walk.say(B)
    assert EOS in walk.may()
    walk.say(EOS)
    walk.index = 2
    assert A in walk.say(A, B).may()


def test_a_token_that_was_not_allowed_is_noticed(make: Make) -> None:
    walk = Walk(make("regex", "a+"))
    walk.constraint.record(C, 0)
    assert walk.constraint.allow_into(blank(), 1) == REFUSED


@pytest.mark.parametrize("ends", [(EOS,), ()])
def test_nothing_at_all(make: Make, ends: tuple[int, ...]) -> None:
    walk = Walk(make("regex", ""), eos_token_ids=ends)
    if ends:
        assert walk.may() == {EOS}
    else:
        assert walk.constraint.allow_into(blank(), 0) == GRAMMAR_FAULT + NO_TOKEN
