"""A byte-level vocabulary whose model has more ids than the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moestro.grammar.compiler import Compiler
from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import Vocabulary, Words, words
from moestro.types import Grammar
from tests.oracle import vocabulary as oracle

SIZE = 300  # the tokenizer has 263
PIECES = (b'":', b"ab", b"}}")
TEXT = oracle.build(PIECES)


def ids(text: str) -> list[int]:
    """Its bytes, one token each."""
    return [oracle.FIRST_BYTE + byte for byte in text.encode()]


def allowed(row: Words) -> set[int]:
    """The tokens whose bits are set."""
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def blank() -> Words:
    return np.full(words(SIZE), 0x5A5A5A5A, np.int32)


def mask(matcher: Matcher) -> set[int]:
    row = blank()
    matcher.mask_into(row)
    return allowed(row)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vocabulary")
    oracle.write(made, TEXT, max_length=512)
    return made


@pytest.fixture(scope="session")
def vocabulary(folder: Path) -> Iterator[Vocabulary]:
    made = Vocabulary(folder, size=SIZE, eos_token_ids=(oracle.EOS,))
    yield made
    made.close()


@pytest.fixture(scope="session")
def make(vocabulary: Vocabulary) -> Callable[..., Matcher]:
    """A function: the matcher of a grammar."""
    compiler = Compiler(vocabulary)
    return lambda kind, text: compiler.matcher(Grammar(kind, text))
