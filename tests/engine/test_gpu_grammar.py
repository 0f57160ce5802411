"""Masks on a GPU's way through a step: launched ahead, at a fault, given back. No model is run.

The graphs are scripted: each step writes the logits that a test says. Triton's interpreter samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import numpy as np
import torch

from moestro.engine.gpu import executor as module
from moestro.engine.gpu.executor import GpuExecutor
from moestro.engine.gpu.graphs import Launched
from moestro.engine.gpu.sampler import DeviceSampler
from moestro.grammar.compiler import Compiler
from moestro.grammar.constraint import NO_TOKEN
from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import Vocabulary
from moestro.kernels.gpu import sampling
from moestro.kernels.gpu.tables import Fault
from moestro.scheduler.plan import DecodePlan, DecodeRow, Sampled
from moestro.types import GRAMMAR_FAULT, Grammar, Request, SamplingParams
from tests.oracle import vocabulary as oracle
from tests.oracle.interpreter import mend
from tests.oracle.vocabulary import EOS

TEXT = oracle.build()
SIZE, ROWS = len(TEXT) + 20, 2
WILD = SIZE - 1  # no token of the tokenizer, and what the model likes best
A, B, ONE, TWO = (TEXT.id(letter.encode()) for letter in "ab12")

Make = Callable[[str, str], Matcher]


@dataclass
class Script:
    """Stands in for `Graphs` and its steps. `likes` are tokens with a good logit."""

    shared: Any
    likes: tuple[int, ...] = (B, TWO)
    faults: set[int] = field(default_factory=set)  # steps that meet one
    steps: int = 0

    def launch(self, plan: DecodePlan, params: Any, salts: Any) -> Launched:
        logits = self.shared.logits
        logits.zero_()
        logits[:, list(self.likes)] = 2.0
        logits[:, WILD] = 5.0
        self.shared.sampled.fill_(WILD)
        self.steps += 1
        step = Scripted(
            self.shared, Fault.NOT_IN_HOST_MEMORY if self.steps in self.faults else Fault.NONE
        )
        return Launched(step, [ROWS - 1 - n for n in range(len(plan.rows))])  # type: ignore[arg-type]


class Scripted:
    """One step. What it reports is read when it is downloaded."""

    rows = ROWS

    def __init__(self, shared: Any, fault: int) -> None:
        self._shared, self._fault = shared, fault
        self.report = self
        self.on_device = {"finite": torch.ones(ROWS, dtype=torch.bool)}

    def sampling(self) -> sampling.Rows:
        zeros = torch.zeros(ROWS, dtype=torch.int64)
        return sampling.Rows(
            zeros.float(), zeros.int(), zeros.double() + 1, zeros.double(), zeros, zeros
        )

    def scramble(self) -> None:
        pass

    finish = scramble

    def download(self) -> dict[str, np.ndarray[Any, Any]]:
        return {
            "fault": np.array([self._fault, 0]),
            "tokens": self._shared.sampled.numpy().copy(),
            "finite": self.on_device["finite"].numpy().copy(),
        }


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    mend()
    cache = SimpleNamespace(dirty=False, recent=False, refresh=lambda: None)
    shared = SimpleNamespace(
        tables=torch.zeros(1),
        spec=SimpleNamespace(vocab_size=SIZE),
        cache=cache,
        logits=torch.zeros(ROWS, SIZE),
        sampled=torch.zeros(ROWS, dtype=torch.int64),
        kv=SimpleNamespace(scrub=lambda blocks: None),
    )
    monkeypatch.setattr(module, "ExpertStream", lambda cache: None)
    monkeypatch.setattr(GpuExecutor, "_record", lambda self, flying: None)
    return Script(shared)


@pytest.fixture
def executor(script: Script) -> GpuExecutor:
    sampler = DeviceSampler(SIZE, torch.device("cpu"), scramble=False)
    spaces: Any = (None, None)
    return GpuExecutor(script.shared, script, sampler, spaces)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("tokens")
    oracle.write(folder, TEXT, max_length=64)
    compiler = Compiler(Vocabulary(Path(folder), size=SIZE, eos_token_ids=(EOS,)))
    return lambda kind, text: compiler.matcher(Grammar(kind, text))  # type: ignore[arg-type]


def request(id: str, **sampling: Any) -> Request:
    given = {"max_tokens": 9, "temperature": 0.0, "eos_token_ids": (EOS,)} | sampling
    return Request(id, (1, 2), SamplingParams(**given))


def plan(index: int, ids: str = "bf", token: int | None = None) -> DecodePlan:
    """A step that samples output `index` of each."""
    return DecodePlan(tuple(DecodeRow(id, token, 2 + index, (0,), index) for id in ids), index)


def tokens(found: list[Sampled]) -> dict[str, int]:
    assert [one.error for one in found] == [None] * len(found)
    return {one.id: one.token for one in found}


def test_a_mask_needs_the_token_of_the_step_before_which_nobody_has_read(
    executor: GpuExecutor, make: Make
) -> None:
    executor.add(request("b", logprobs=1), make("regex", "[ab][12]"))
    executor.add(request("f"))
    executor.launch(plan(1, "f"))
    assert tokens(executor.collect()) == {"f": WILD}
    executor.launch(plan(0))
    for index, token in ((1, B), (2, TWO), (3, EOS)):
        assert executor.runs_ahead(plan(index))
        if index < 3:
            executor.launch(plan(index))
        found = executor.collect()
        assert tokens(found) == {"b": token, "f": WILD}
        assert found[0].logprobs is not None
        assert found[0].logprobs.token_id == token
        assert found[0].logprobs.top[0][0] == WILD, "of the raw logits"


def test_what_was_never_told_is_taken_back(
    executor: GpuExecutor, script: Script, make: Make
) -> None:
    """A sequence that gave way while a step was under way samples that output again."""
    executor.add(request("b"), make("regex", "a1|b2"))
    executor.launch(plan(0, "b"))
    executor.launch(plan(1, "b"))
    assert tokens(executor.collect()) == {"b": B}
    assert tokens(executor.collect()) == {"b": TWO}
    script.likes = (A, ONE)
    executor.launch(plan(0, "b"))
    assert tokens(executor.collect()) == {"b": A}
    executor.launch(plan(1, "b", token=A))
    assert tokens(executor.collect()) == {"b": ONE}


def test_a_step_behind_a_fault_is_not_masked_but_done_again(
    executor: GpuExecutor, script: Script, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[DecodePlan] = []
    monkeypatch.setattr(executor, "_faulted", lambda flying: None)
    monkeypatch.setattr(executor, "_again", lambda flying: again.append(flying.plan) or [])
    script.faults = {1, 2}
    executor.add(request("b"), make("regex", "[ab][12]"))
    executor.launch(plan(0, "b"))
    executor.launch(plan(1, "b"))
    assert executor.collect() == []
    assert executor.collect() == []
    assert [one.number for one in again] == [0, 1]
    executor.launch(plan(0, "b"))
    assert tokens(executor.collect()) == {"b": B}


def test_a_dead_grammar_and_a_bad_number_end_one_row(executor: GpuExecutor, make: Make) -> None:
    executor.add(request("b"), make("lark", f"start: /b/ <[{WILD}]>"))
    executor.add(request("f"), make("regex", "[ab][12]"))
    executor.launch(plan(0))
    executor.launch(plan(1))
    assert tokens(executor.collect()) == {"b": B, "f": B}
    found = {one.id: one for one in executor.collect()}
    assert found["b"].error == GRAMMAR_FAULT + NO_TOKEN
    assert (found["f"].error, found["f"].token) == (None, TWO)


def test_without_eos_the_last_token_says_that_it_is_complete(
    executor: GpuExecutor, make: Make
) -> None:
    executor.add(request("b", eos_token_ids=()), make("regex", "[ab][12]"))
    executor.launch(plan(0, "b"))
    executor.launch(plan(1, "b"))
    assert [one.complete for one in executor.collect()] == [False]
    assert [one.complete for one in executor.collect()] == [True]


def test_penalties_beside_a_grammar_still_wait_for_each_token(
    executor: GpuExecutor, make: Make
) -> None:
    executor.add(request("b", frequency_penalty=1.9), make("regex", "[ab]{3}"))
    for index, token in enumerate((B, B, A)):
        assert not executor.runs_ahead(plan(index, "b"))
        executor.launch(plan(index, "b"))
        assert tokens(executor.collect()) == {"b": token}
