"""The other end of `grammar.trial`: compiles one grammar after the other, follows it for a few
tokens, and says what is wrong.

Reads JSON lines from standard input and answers each with one; ends when that pipe closes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from moestro.errors import GrammarError
from moestro.grammar.compiler import compile_grammar, words_of
from moestro.grammar.vocabulary import Tokens, read_tokens
from moestro.grammar.walk import walk
from moestro.types import Grammar

MOST_MEMORY = 2 << 30  # bytes beyond what it has when the tokenizer is read


def main() -> None:
    """Entry point of the process."""
    start = json.loads(sys.stdin.readline())
    try:
        tokens = read_tokens(Path(start["folder"]), start["size"], tuple(start["eos_token_ids"]))
    except GrammarError as error:
        _answer(error.message)
        return
    _limit_memory()
    os.nice(5)  # those who wait for tokens go first
    _answer(None)
    for line in sys.stdin:
        given = json.loads(line)
        _answer(_problem(Grammar(given["kind"], given["text"]), tokens))


def _problem(grammar: Grammar, tokens: Tokens) -> str | None:
    try:
        fault = walk(compile_grammar(grammar, tokens), tokens)
    except GrammarError as error:
        return error.message
    return None if fault is None else words_of(grammar, fault)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_MEMORY
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _answer(problem: str | None) -> None:
    print(json.dumps({"problem": problem}), flush=True)


if __name__ == "__main__":
    main()
