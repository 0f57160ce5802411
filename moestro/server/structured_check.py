"""Grammars made and checked before anything is queued. Owns: threads, bounds and what is known.

A grammar that was good is known from then on; the same one asked for by several requests at once
is made once. Does not own: what a grammar is made of (`structured_plan`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from moestro.errors import GrammarError, InvalidRequest, QueueFull
from moestro.grammar.check import check
from moestro.grammar.vocabulary import Vocabulary
from moestro.server.sampling import Vocabulary as Ids
from moestro.server.structured import Constraint
from moestro.server.structured_lark import SpecialId
from moestro.server.structured_plan import Plan, grammar_of
from moestro.types import Grammar

MOST_WAITING = 32  # grammars being made at the same time
SECONDS = 20.0  # that one request waits for its grammar
MOST_KNOWN = 1024
MOST_CHARACTERS = 8 * 1024 * 1024  # of grammars and what they were made of


class Check(Protocol):
    """What says whether a grammar is any good."""

    def __call__(self, grammar: Grammar) -> None:
        """Raise `GrammarError` for a grammar that is no good. Blocks."""
        ...

    def close(self) -> None:
        """Give back what checking needs."""
        ...


class Trials:
    """Checks grammars against a checkpoint's tokenizer. `ids` says what the model can emit."""

    def __init__(self, folder: Path | None, ids: Callable[[], Ids]) -> None:
        self._folder = folder
        self._ids = ids
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None

    def __call__(self, grammar: Grammar) -> None:
        """Raise `GrammarError` for a grammar that is no good. Blocks."""
        if self._folder is None:
            raise GrammarError("grammars need a checkpoint with a tokenizer.json")
        with self._lock:
            if self._vocabulary is None:
                ids = self._ids()
                self._vocabulary = Vocabulary(
                    self._folder, size=ids.size, eos_token_ids=ids.eos_token_ids
                )
        check(grammar, self._vocabulary)

    def close(self) -> None:
        """Give back what checking needs."""
        if self._vocabulary is not None:
            self._vocabulary.close()


@dataclass(frozen=True, slots=True)
class Problem:
    """Why there is no grammar."""

    message: str
    param: str


@dataclass(slots=True)
class _Making:
    """A grammar on its way. `wanted`: how many requests wait for it."""

    work: Future[Grammar | Problem]
    result: asyncio.Future[Grammar | Problem]  # the same, for the event loop
    wanted: int = 0


class Grammars:
    """Makes grammars. `special`: see `structured_lark.SpecialId`. Close it to end its threads."""

    def __init__(
        self,
        check: Check,
        special: SpecialId,
        *,
        waiting: int = MOST_WAITING,
        seconds: float = SECONDS,
    ) -> None:
        self._check = check
        self._special = special
        self._waiting = waiting
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="moestro-grammar")
        self._making: dict[Plan, _Making] = {}
        self._known: OrderedDict[Plan, Grammar] = OrderedDict()
        self._characters = 0

    async def grammar(self, plan: Plan) -> Grammar:
        """Return the grammar of a plan that asks for one.

        Raises `GrammarError` naming the field at fault, `QueueFull`, `Unavailable`.
        """
        found = self._known.get(plan) or await self._made(plan)
        if plan in self._known:
            self._known.move_to_end(plan)
        if isinstance(found, Problem):
            raise GrammarError(found.message, param=found.param)
        return found

    def close(self) -> None:
        """Let the threads end; a check that runs is finished first."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._check.close()

    async def _made(self, plan: Plan) -> Grammar | Problem:
        making = self._making.get(plan) or self._begin(plan)
        making.wanted += 1
        try:
            # Who leaves or is late does not stop it: others may wait for the same grammar.
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(making.result)
        except TimeoutError:
            took = f"'{plan.param}' took more than {self._seconds:g} s to compile."
            return Problem(took, plan.param)
        finally:
            making.wanted -= 1
            if not making.wanted and making.work.cancel():  # it had not begun
                del self._making[plan]

    def _begin(self, plan: Plan) -> _Making:
        if len(self._making) >= self._waiting:
            raise QueueFull(f"{self._waiting} grammars are being compiled; try again later.")
        work = self._pool.submit(self._make, plan)
        making = self._making[plan] = _Making(work, asyncio.wrap_future(work))
        making.result.add_done_callback(lambda done: self._done(plan, done))
        return making

    def _done(self, plan: Plan, future: asyncio.Future[Grammar | Problem]) -> None:
        making = self._making.get(plan)
        if making is not None and making.result is future:
            del self._making[plan]
        if future.cancelled() or future.exception() is not None:
            return
        made = future.result()
        if isinstance(made, Problem):  # another time it may be no problem
            return
        self._known[plan] = made
        self._characters += _size(plan, made)
        while self._characters > MOST_CHARACTERS or len(self._known) > MOST_KNOWN:
            self._characters -= _size(*self._known.popitem(last=False))

    def _make(self, plan: Plan) -> Grammar | Problem:
        """Blocking: runs in the pool."""
        try:
            grammar = grammar_of(plan, self._special)
        except InvalidRequest as error:
            return Problem(error.message, error.param or "tools")
        problem = self._error(grammar)
        if problem is None and plan.answer is not None and plan != Plan(plan.answer):
            # Where a call is needed no answer is written; it must be good by itself all the same.
            problem = self._error(grammar_of(Plan(plan.answer), self._special))
        return grammar if problem is None else self._blame(plan, problem)

    def _error(self, grammar: Grammar) -> str | None:
        try:
            self._check(grammar)
        except InvalidRequest as error:
            return error.message
        return None

    def _blame(self, plan: Plan, error: str) -> Problem:
        """Return the error with the field whose part is no good even alone."""
        parts = [*self._parts(plan)]
        for grammar, param in parts if len(parts) > 1 else ():
            alone = self._error(grammar)
            if alone is not None:
                return Problem(f"'{param}': {alone}", param)
        param = parts[0][1] if len(parts) == 1 else "tools"
        return Problem(f"'{param}': {error}", param)

    def _parts(self, plan: Plan) -> Iterator[tuple[Grammar, str]]:
        answers = [] if plan.answer is None else [plan.answer]
        for tool in plan.calls.tools if plan.calls is not None else ():
            lenient = not tool.strict
            answers.append(Constraint("json_schema", tool.schema, tool.param, lenient))
        for answer in answers:
            yield grammar_of(Plan(answer), self._special), answer.param


def _size(plan: Plan, made: Grammar) -> int:
    """Return the characters that are kept."""
    answer = len(plan.answer.text) if plan.answer is not None else 0
    tools = sum(len(t.schema) for t in plan.calls.tools) if plan.calls is not None else 0
    return answer + tools + len(made.text)
