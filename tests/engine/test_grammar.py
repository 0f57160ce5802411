"""Sequences whose output must match a grammar, on a whole engine."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moestro.engine.engine import Engine
from moestro.grammar.compiler import Compiler
from moestro.types import Finish, Grammar, Request, SamplingParams
from tests.oracle import drive, tiny
from tests.oracle.drive import generate, greedy
from tests.oracle.vocabulary import EOS, FIRST_BYTE, TURN

WORD = Grammar("regex", "[a-m]{3}-[n-z]{2,5}")
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "kind": {"enum": ["alpha", "beta"]},
            },
            "required": ["name", "age", "kind"],
            "additionalProperties": False,
        }
    ),
)
DEAD = Grammar("lark", "start: /a/ <[287]>")  # the model has this id, its tokenizer has not


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("grammar") / "model", tiny.Spec("olmoe", 2))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with drive.engine(model, kv_cache_tokens=1024) as built:
        yield built


def ask(id: str, grammar: Grammar | None, *, tokens: int = 80, **sampling: Any) -> Request:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 7, "eos_token_ids": (EOS,)} | sampling
    return Request(id, tuple(range(9)), SamplingParams(tokens, grammar=grammar, **params))


def text(tokens: Sequence[int]) -> str:
    return bytes(token - FIRST_BYTE for token in tokens if token >= FIRST_BYTE).decode()


def run(engine: Engine, request: Request) -> drive.Output:
    return generate(engine, [request])[request.id]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_the_output_matches_and_ends_with_eos(engine: Engine, temperature: float) -> None:
    for seed in range(2):
        out = run(engine, ask("a", WORD, temperature=temperature, seed=seed))
        assert re.fullmatch(WORD.text, text(out.tokens))
        assert (out.tokens[-1], out.finish) == (EOS, Finish.STOP)
        answer = json.loads(text(run(engine, ask("b", SCHEMA, tokens=400, seed=seed)).tokens))
        assert set(answer) == {"name", "age", "kind"}
        assert 0 <= answer["age"] <= 150


def test_neighbours_change_nothing_and_nothing_changes_for_them(engine: Engine) -> None:
    free = [ask("free", None), greedy("greedy", range(20), 40), ask("cut", None, top_p=0.7)]
    bound = [ask("word", WORD, logprobs=2), ask("json", SCHEMA), ask("hot", WORD, top_k=5, seed=1)]
    alone = {request.id: run(engine, request) for request in (*free, *bound)}
    together = generate(engine, [*free, *bound])
    staggered = generate(engine, [*bound, *free], every=3)
    for id, out in alone.items():
        for found in (together[id], staggered[id]):
            assert (found.tokens, found.finish) == (out.tokens, out.finish), id
            near = pytest.approx([one.logprob for one in out.logprobs], abs=1e-5)
            assert [one.logprob for one in found.logprobs] == near


def test_every_way_of_sampling_keeps_to_the_grammar(engine: Engine) -> None:
    ways: list[dict[str, Any]] = [
        {"top_k": 3, "top_p": 0.5},
        {"min_p": 0.2},
        {"logit_bias": {FIRST_BYTE + ord("!"): 100.0, EOS: 100.0}},
        {"repetition_penalty": 1.7, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"min_tokens": 9},
        {"stop_token_ids": (FIRST_BYTE + ord("j"), FIRST_BYTE + ord("!"))},
    ]
    requests = [ask(f"{n}", WORD, seed=n, **way) for n, way in enumerate(ways)]
    outputs = generate(engine, requests)
    for id, out in outputs.items():
        said = out.tokens if out.stop_token is None else out.tokens[:-1]
        assert out.finish is Finish.STOP
        assert re.fullmatch(WORD.text, text(said)), id
    assert len(text(outputs["2"].tokens)) == 6, "as soon as it may, it ends"
    assert len(outputs["4"].tokens) == 10, "min_tokens, until the grammar has no more"


def test_logprobs_are_of_the_raw_logits(engine: Engine) -> None:
    plain = run(engine, ask("a", None, tokens=1, logprobs=3))
    bound = run(engine, ask("a", WORD, tokens=1, logprobs=3))
    assert bound.logprobs[0].top == plain.logprobs[0].top
    assert bound.logprobs[0].logprob < plain.logprobs[0].top[0][1]


def test_without_eos_it_ends_with_the_last_token_that_fits(engine: Engine) -> None:
    out = run(engine, ask("a", Grammar("regex", "[ab]{4}"), eos_token_ids=(), min_tokens=6))
    assert re.fullmatch("[ab]{4}", text(out.tokens))
    assert (len(out.tokens), out.finish, out.stop_token) == (4, Finish.STOP, None)


def test_max_tokens_cuts_it_off(engine: Engine) -> None:
    out = run(engine, ask("a", WORD, tokens=4))
    assert re.fullmatch("[a-m]{3}-", text(out.tokens))
    assert out.finish is Finish.LENGTH


def test_an_end_that_the_grammar_names(engine: Engine) -> None:
    grammar = Grammar("lark", "start: /[a-c]{2}/ <|im_start|>")
    out = run(engine, ask("a", grammar, stop_token_ids=(TURN,)))
    assert re.fullmatch("[a-c]{2}", text(out.tokens))
    assert (out.tokens[-1], out.stop_token, out.finish) == (TURN, TURN, Finish.STOP)


@pytest.mark.parametrize(
    ("grammar", "tokens", "words"),
    [
        (DEAD, 1, "no token of this model"),
        (Grammar("lark", "start: <[287]>"), 0, "no token of this model"),
        (Grammar("regex", "("), 0, "unclosed group"),
        (Grammar("json_schema", '{"type":"foo"}'), 0, "Invalid type: foo"),
    ],
)
def test_what_cannot_go_on_fails_alone(
    engine: Engine, grammar: Grammar, tokens: int, words: str
) -> None:
    alone = run(engine, ask("fine", WORD)).tokens
    outputs = generate(engine, [ask("fine", WORD), ask("bad", grammar), ask("free", None)])
    assert (len(outputs["bad"].tokens), outputs["bad"].finish) == (tokens, Finish.ERROR)
    assert words in (outputs["bad"].error or "")
    assert outputs["fine"].tokens == alone
    assert outputs["free"].finish is not Finish.ERROR


def test_choices_of_one_grammar_are_independent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    from moestro.grammar import compiler

    compile_grammar = compiler.compile_grammar
    monkeypatch.setattr(
        compiler, "compile_grammar", lambda g, t: compiled.append(g) or compile_grammar(g, t)
    )
    alone = {n: run(engine, ask(f"{n}", WORD, seed=n)).tokens for n in range(5)}
    outputs = generate(engine, [ask(f"{n}", WORD, seed=n) for n in range(5)])
    assert {n: outputs[f"{n}"].tokens for n in range(5)} == alone
    assert len({tuple(tokens) for tokens in alone.values()}) > 2
    assert compiled == [WORD]


def test_recomputing_after_giving_way_keeps_the_place_in_the_grammar(model: Path) -> None:
    grammar = Grammar("regex", "([a-f][0-9]){20}")
    requests = [ask(f"{n}", grammar, seed=n, tokens=60) for n in range(4)]
    with drive.engine(model, kv_cache_tokens=1024) as roomy:
        expected = {request.id: run(roomy, request).tokens for request in requests}
    with drive.engine(model, kv_cache_tokens=96, max_model_len=64) as tight:
        outputs = generate(tight, requests)
        assert tight.stats().scheduler.preemptions > 0
    assert {id: out.tokens for id, out in outputs.items()} == expected
    assert all(re.fullmatch(grammar.text, text(out.tokens)) for out in outputs.values())


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_another_engine_goes_on_where_the_first_one_stopped(engine: Engine, cut: int) -> None:
    whole = run(engine, ask("a", WORD))
    rest = run(engine, replace(ask("a", WORD), generated=tuple(whole.tokens[:cut])))
    assert whole.tokens[:cut] + rest.tokens == whole.tokens
    wrong = run(engine, replace(ask("a", WORD), generated=(FIRST_BYTE,)))
    assert wrong.finish is Finish.ERROR
    assert "do not match" in (wrong.error or "")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compiling waits until this is set."""
    event, matcher = threading.Event(), Compiler.matcher

    def slow(self: Compiler, grammar: Grammar) -> Any:
        assert event.wait(30)
        return matcher(self, grammar)

    monkeypatch.setattr(Compiler, "matcher", slow)
    yield event
    event.set()


def turns(engine: Engine, until: Callable[[], bool]) -> list[Any]:
    events = []
    while not until():
        events += engine.step()
    return events


def test_others_run_while_a_grammar_is_compiled(engine: Engine, gate: threading.Event) -> None:
    engine.add(ask("bound", WORD))
    engine.add(ask("free", None, tokens=5, eos_token_ids=()))
    found = turns(engine, lambda: engine.stats().scheduler.finished["length"] == 1)
    assert {event.id for event in found} == {"free"}
    engine.step()
    engine.step()
    assert engine.compiling
    assert engine.stats().scheduler.waiting == 1
    gate.set()
    events = turns(engine, lambda: engine.idle)
    tokens = [token for event in events for token in event.token_ids]
    assert re.fullmatch(WORD.text, text(tokens))
    assert events[-1].timing.queued > 0
    assert not engine.compiling


@pytest.mark.parametrize("again", [False, True])
def test_leaving_while_a_grammar_is_compiled_leaves_nothing(
    engine: Engine, gate: threading.Event, again: bool
) -> None:
    """Nor does one with the same id that comes at once take the other's matcher."""
    engine.add(ask("a", WORD))
    engine.step()
    engine.abort("a")
    if again:
        engine.add(ask("a", Grammar("regex", "x{3}")))
    gate.set()
    events = turns(engine, lambda: engine.idle)
    tokens = [token for event in events for token in event.token_ids]
    assert text(tokens) == ("xxx" if again else "")
    assert engine._grammars.pending == 0
    assert engine._executor._sampler._rows == {}
