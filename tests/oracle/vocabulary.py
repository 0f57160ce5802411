"""The byte-level tokenizer that every test checkpoint carries.

Owns: tokenizer.json and tokenizer_config.json, written by hand so that each byte is one known id.
Does not own: which extra pieces a checkpoint wants (`scripted` adds its own).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BOS, EOS, PAD, TURN = 0, 1, 2, 3
SPECIALS = ("<|bos|>", "<|im_end|>", "<|pad|>", "<|im_start|>")
FIRST_BYTE = len(SPECIALS)  # id of byte 0

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """Ids of special tokens, bytes and extra pieces, in that order."""

    vocab: dict[str, int]  # piece in the byte-level alphabet, or a special token -> id
    specials: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.vocab)

    def id(self, piece: bytes) -> int:
        """Id of a byte string that is one token."""
        return self.vocab[spell(piece)]


def spell(piece: bytes) -> str:
    """A byte string in the printable alphabet that byte-level tokenizers store."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return "".join(table[b] for b in piece)


def build(pieces: Sequence[bytes] = (), more_specials: Sequence[str] = ()) -> Vocabulary:
    """A vocabulary of all bytes, `pieces` (each one token) and some more special tokens."""
    specials = (*SPECIALS, *more_specials)
    names = [
        *SPECIALS,
        *(spell(bytes([b])) for b in range(256)),
        *more_specials,
        *map(spell, pieces),
    ]
    vocab: dict[str, int] = {}
    for name in names:
        vocab.setdefault(name, len(vocab))
    return Vocabulary(vocab, specials)


def write(
    folder: Path, vocabulary: Vocabulary, *, max_length: int, chat_template: str = CHAT_TEMPLATE
) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    _dump(folder / "tokenizer.json", _tokenizer(vocabulary))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[PAD],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": chat_template,
    }
    _dump(folder / "tokenizer_config.json", settings)


def _tokenizer(vocabulary: Vocabulary) -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(name, vocabulary.vocab[name]) for name in vocabulary.specials],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        # No merges: text becomes bytes, and a piece comes out only when the model says its id.
        "model": {"type": "BPE", "vocab": vocabulary.vocab, "merges": []},
    }


def _added(content: str, number: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
