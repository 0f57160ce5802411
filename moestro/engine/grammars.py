"""Grammars on their way to the engine: compiled in a thread, while the loop goes on.

Owns: which sequences wait for theirs. Does not own: their place in the queue (`scheduler`), or
what a grammar may cost, which was checked before it came here (`grammar.check`).
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from moestro.errors import GrammarError
from moestro.grammar.compiler import Compiler
from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import Vocabulary
from moestro.types import GRAMMAR_FAULT, Request

log = logging.getLogger(__name__)


class Grammars:
    """Makes matchers, one after the other. The first grammar also has the vocabulary read."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._compiler = Compiler(vocabulary)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")  # starts when used
        self._pending: dict[str, tuple[Request, Future[Matcher]]] = {}

    @property
    def pending(self) -> int:
        """How many sequences wait."""
        return len(self._pending)

    def start(self, request: Request) -> None:
        """Begin to make the matcher of a request that has a grammar."""
        self._pending[request.id] = request, self._thread.submit(self._matcher, request)

    def forget(self, id: str) -> None:
        """The sequence is gone. Harmless when it does not wait."""
        if id in self._pending:
            self._pending.pop(id)[1].cancel()

    def done(self) -> list[tuple[Request, Matcher | str]]:
        """Those whose matcher is ready since this was asked last, or what is wrong with it."""
        ready = [id for id, (_, future) in self._pending.items() if future.done()]
        return [(request, _outcome(future)) for request, future in map(self._pending.pop, ready)]

    def close(self) -> None:
        """End the thread; who still waits is forgotten."""
        self._pending.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, request: Request) -> Matcher:
        assert request.sampling.grammar is not None
        matcher = self._compiler.matcher(request.sampling.grammar)
        if not all(matcher.accept(token) for token in request.generated):
            raise GrammarError("The tokens so far do not match the grammar.")
        return matcher


def _outcome(future: Future[Matcher]) -> Matcher | str:
    try:
        return future.result()
    except GrammarError as error:
        return f"{GRAMMAR_FAULT}{error.message}"
    except Exception as error:  # the library's, which no request can be blamed for
        log.exception("a grammar could not be compiled")
        return f"the grammar could not be compiled: {type(error).__name__}"
