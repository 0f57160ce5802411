"""The question a server asks of a grammar from outside, before anything else is done with it."""

from __future__ import annotations

from moestro.grammar.compiler import check_size
from moestro.grammar.vocabulary import Vocabulary
from moestro.types import Grammar


def check(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Raise GrammarError, with what is wrong, unless `grammar` can be used with `vocabulary`.

    Blocks: microseconds when it was asked before, milliseconds mostly, and never longer than
    `trial.MOST_SECONDS` for the grammar itself. The first call starts a process, which reads the
    tokenizer. Call it in a thread. Raises Unavailable when too many wait for their turn.
    """
    check_size(grammar)
    vocabulary.trial.run(grammar)
