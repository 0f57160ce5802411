"""Grammars tried against small tokenizers, without a process of their own."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from moestro.grammar.compiler import Compiler
from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import Vocabulary, words
from moestro.server.detokenize import byte_alphabet
from moestro.types import Grammar
from tests.fakes import EOS

ALPHABET = byte_alphabet()
CLOSERS = frozenset(b'"}]<\n/')


class Library:
    """Checks grammars as the server does, and plays the model that obeys one."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self._size = backend.get_vocab_size()
        self._vocabulary: Vocabulary | None = None
        self.checked: list[Grammar] = []

    @property
    def vocabulary(self) -> Vocabulary:
        """Read when it is first needed: most tests have no grammar."""
        if self._vocabulary is None:
            with TemporaryDirectory() as folder:
                self.backend.save(f"{folder}/tokenizer.json")
                self._vocabulary = Vocabulary(Path(folder), size=self._size, eos_token_ids=(EOS,))
                assert self._vocabulary.tokens
        return self._vocabulary

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return the grammar at its start. Raises GrammarError."""
        return Compiler(self.vocabulary).matcher(grammar)

    def __call__(self, grammar: Grammar) -> None:
        self.checked.append(grammar)
        self.matcher(grammar)

    def close(self) -> None:
        """There is nothing to give back."""

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether a model may write exactly this, token by token, and end there."""
        matcher = self.matcher(grammar)
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return all(map(matcher.accept, ids)) and matcher.may_end

    def written(self, grammar: Grammar, seed: int, most: int = 600) -> str | None:
        """What a model of random taste writes; None when it does not come to an end."""
        matcher = self.matcher(grammar)
        rng = random.Random(seed)
        mask = np.empty(words(self._size), np.int32)
        ids: list[int] = []
        while len(ids) < most:
            matcher.mask_into(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = [int(token) for token in np.flatnonzero(bits) if token != EOS]
            if matcher.may_end and (not allowed or rng.random() < 0.3):
                return b"".join(map(self._bytes, ids)).decode("utf-8", "replace")
            assert allowed, matcher.fault
            closing = [token for token in allowed if self._bytes(token)[0] in CLOSERS]
            ids.append(rng.choice(closing if closing and rng.random() < 0.5 else allowed))
            assert matcher.accept(ids[-1])
        return None

    def _bytes(self, token: int) -> bytes:
        name = self.backend.id_to_token(token)
        return name.encode() if len(name) > 1 else bytes([ALPHABET[name]])
