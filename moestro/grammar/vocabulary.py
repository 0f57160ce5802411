"""A model's tokens as grammars need them.

Owns: reading tokenizer.json for that, once, when it is first asked for; and the process that tries
new grammars (`grammar.trial`). Does not own: text (`server.tokenizer`) or grammars.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from moestro.errors import GrammarError
from moestro.grammar.trial import Trial

Words = npt.NDArray[np.int32]  # bit t % 32 of word t // 32 stands for token t


def words(size: int) -> int:
    """Words of a mask over `size` tokens."""
    return -(-size // 32)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What was read. `real`: the ids that stand for something. A model often has more ids, to fill
    up its tables, and no grammar may let it choose one of those."""

    library: LLTokenizer
    real: Words


class Vocabulary:
    """The tokens of the checkpoint in `folder`, whose model has `size` ids.

    Cheap to make. `tokens` reads the file: a second for 128,000 tokens, in which no other thread of
    the process runs.
    """

    def __init__(self, folder: Path, *, size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._size = size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._tokens: Tokens | None = None
        self.trial = Trial(folder, size, eos_token_ids)

    @property
    def tokens(self) -> Tokens:
        """The tokens; GrammarError when the checkpoint has none that can be read."""
        with self._lock:
            if self._tokens is None:
                self._tokens = read_tokens(self._folder, self._size, self._eos_token_ids)
            return self._tokens

    def close(self) -> None:
        """End the process that tries grammars."""
        self.trial.close()


def read_tokens(folder: Path, size: int, eos_token_ids: tuple[int, ...]) -> Tokens:
    """Read tokenizer.json; GrammarError when there is none, or none that can be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise GrammarError("Grammars need a tokenizer.json, which this checkpoint does not have.")
    try:
        text = path.read_text(encoding="utf-8")
        ids = np.array(_ids(json.loads(text)))
        library = LLTokenizer(
            text.strip(),
            n_vocab=max(size, int(ids.max()) + 1),
            eos_token=list(eos_token_ids) or None,
        )
    except Exception as error:  # the library raises whatever its parts raise
        raise GrammarError(
            f"Grammars cannot be used with this checkpoint's tokenizer.json: {error}"
        ) from None
    real = np.zeros(words(size) * 32, np.uint8)
    real[ids[ids < size]] = 1
    return Tokens(library, np.packbits(real, bitorder="little").view(np.int32))


def _ids(content: dict[str, object]) -> list[int]:
    """All ids in a tokenizer.json."""
    model, added = content["model"], content.get("added_tokens") or []
    assert isinstance(model, dict) and isinstance(added, list)
    vocab = model["vocab"]  # token -> id, or for Unigram a list in the order of ids
    numbers = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return [*numbers, *(token["id"] for token in added)]
