"""One grammar for all that a request asks. Owns: how reasoning, calls and answer go together."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from moestro.errors import InvalidRequest
from moestro.server.reasoning import Marks
from moestro.server.structured import Constraint
from moestro.server.structured_lark import Lark, SpecialId
from moestro.server.structured_tags import tags_rule
from moestro.server.tools_grammar import needed, within_text
from moestro.server.tools_harmony_grammar import harmony_grammar
from moestro.server.tools_rules import Calls
from moestro.types import Grammar

BREAKS = r"/\n{0,2}/"  # between reasoning and answer; more would be the answer's


@dataclass(frozen=True, slots=True)
class Plan:
    """What a grammar must hold an answer to. `marks`: reasoning may come first.

    `opened`: the prompt ends inside the reasoning.
    """

    answer: Constraint | None = None
    calls: Calls | None = None
    marks: Marks | None = None
    opened: bool = False
    harmony: bool = False

    @property
    def param(self) -> str:
        """The field to name when something is wrong with the whole."""
        return self.answer.param if self.answer is not None else "tools"

    def __bool__(self) -> bool:
        return self.answer is not None or self.calls is not None


def grammar_of(plan: Plan, special: SpecialId) -> Grammar:
    """Return the grammar. Raises `InvalidRequest` for what cannot be written as one."""
    answer = plan.answer
    alone = plan.calls is None and plan.marks is None and not plan.harmony
    # By itself a schema is always strict.
    if answer is not None and alone and answer.kind != "tags" and not answer.lenient:
        if answer.kind == "gbnf":
            return Grammar("lark", _converted(answer))
        return Grammar(answer.kind, answer.text)
    lark = Lark(special)
    rule = None if answer is None else _embedded(lark, answer)
    if plan.harmony:
        return Grammar("lark", lark.text(harmony_grammar(lark, plan.calls, rule)))
    return Grammar("lark", lark.text(f"{_reasoning(lark, plan)} {_body(lark, plan.calls, rule)}"))


def _body(lark: Lark, calls: Calls | None, answer: str | None) -> str:
    if calls is None:
        assert answer is not None
        return answer
    if calls.needed:
        return needed(lark, calls)
    return within_text(lark, calls) if answer is None else f"({needed(lark, calls)} | {answer})"


def _reasoning(lark: Lark, plan: Plan) -> str:
    if plan.marks is None:
        return ""
    thought = f"{lark.up_to(plan.marks.close)} {lark.terminal(BREAKS)}"
    return thought if plan.opened else f"({lark.marker(plan.marks.open)} {thought})?"


def _embedded(lark: Lark, answer: Constraint) -> str:
    """Return the name of a rule for a constraint."""
    if answer.kind == "json_schema":
        return lark.json(answer.text)
    if answer.kind == "tags":
        return tags_rule(lark, answer.text)
    if answer.kind == "regex":
        return lark.rule(f"/{regex_to_lark(answer.text, 'd')}/")
    text = _converted(answer) if answer.kind == "gbnf" else answer.text
    return lark.rule(f"%lark {{\n{text}\n}}")


def _converted(answer: Constraint) -> str:
    try:
        return gbnf_to_lark(answer.text)
    except Exception as problem:  # the library raises bare Exception
        raise InvalidRequest(
            f"'{answer.param}' is no valid GBNF grammar: {str(problem)[:200]}.", param=answer.param
        ) from None
