"""Token ids to text, one at a time. Owns: UTF-8 that is cut between tokens, and leading spaces.

A character cut off at the very end becomes one U+FFFD; bytes that can never be valid become
U+FFFD at once. Streamed and whole text are the same, because both come from here. Nothing raises.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

log = logging.getLogger(__name__)
SPACE = "\u2581"  # how SentencePiece spells a space
NO_STRIP = {"content": " ", "start": 0, "stop": 0}


class Detokenizer(Protocol):
    """Text of one sequence. After `flush` it is spent."""

    def push(self, token: int) -> str:
        """Return the text that this token completes, possibly empty."""
        ...

    def push_many(self, tokens: Iterable[int]) -> str:
        """Return the text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Return what is left: U+FFFD for a cut character, else nothing."""
        ...

    @property
    def pending(self) -> bool:
        """True while a character is incomplete."""
        ...


@dataclass(frozen=True, slots=True)
class ByteTable:
    """What every token id stands for, as bytes. Ids past the end stand for nothing."""

    visible: list[bytes]  # special tokens spelled out
    plain: list[bytes]  # special tokens empty
    strip: int = 0  # leading spaces that the decoder takes off the whole text

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token, special ones included."""
        return self.visible[token] if 0 <= token < len(self.visible) else b""


class ByteDetokenizer:
    """Looks bytes up and decodes them incrementally: exact for byte-level and byte-fallback BPE."""

    __slots__ = ("_decoder", "_strip", "_table", "pending")

    def __init__(self, table: list[bytes], strip: int) -> None:
        self._table = table
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = False  # see `Detokenizer`: the decoder holds a part of a character

    def push(self, token: int) -> str:
        """See `Detokenizer`."""
        return self.push_many((token,))

    def push_many(self, tokens: Iterable[int]) -> str:
        """See `Detokenizer`."""
        table = self._table
        try:
            data = b"".join([table[token] for token in tokens])
        except IndexError:
            data = b"".join([table[t] for t in tokens if t < len(table)])
        text = self._text(data)
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """See `Detokenizer`."""
        self.pending = False
        return self._decoder.decode(b"", True)

    def _text(self, data: bytes) -> str:
        if not self.pending:
            try:
                return data.decode()  # many times as fast, and mostly right
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def _stripped(self, text: str) -> str:
        while text and self._strip:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class StreamDetokenizer:
    """For every other decoder: the library's stream, and whole decoding where that gives up.

    The library refuses to go on when earlier text would change; then only what is new at the end
    of the whole text is taken, so what was already given out stays a prefix.
    """

    def __init__(
        self, backend: Backend, *, skip_special: bool, hidden: frozenset[int] = frozenset()
    ) -> None:
        self._backend = backend
        self._hidden = hidden  # tokens without text
        self._skip = skip_special
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._given = 0  # characters
        self._waiting = False

    def push(self, token: int) -> str:
        """See `Detokenizer`."""
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._step(token)
        self._waiting = not text
        self._given += len(text)
        return text

    def push_many(self, tokens: Iterable[int]) -> str:
        """See `Detokenizer`."""
        return "".join([self.push(token) for token in tokens])

    def flush(self) -> str:
        """See `Detokenizer`."""
        self._waiting = False
        return self._whole()[self._given :]

    @property
    def pending(self) -> bool:
        """See `Detokenizer`."""
        return self._waiting

    def _step(self, token: int) -> str:
        if self._stream is not None:
            try:
                return self._stream.step(self._backend, token) or ""
            except Exception:  # the library raises bare Exception
                log.info("incremental decoding gave up after %d tokens", len(self._ids))
                self._stream = None
        text = self._whole()
        return "" if text.endswith("\ufffd") else text[self._given :]

    def _whole(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=self._skip)


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each byte, as character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


def byte_table(backend: Backend) -> ByteTable | None:
    """Return the bytes of every token, or None when this decoder is not of a kind known here."""
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        alphabet = byte_alphabet()
        return _table(backend, lambda name: _level_bytes(name, alphabet), 0)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        strip: dict[str, Any] = steps[3] if len(steps) > 3 else NO_STRIP
        replaces = steps[0] == {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        if replaces and strip["content"] == " " and not strip["stop"]:
            return _table(backend, _fallback_bytes, strip["start"])
    return None


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _table(backend: Backend, spell: Any, strip: int) -> ByteTable:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    visible = [b""] * size
    for name, token in vocabulary.items():
        visible[token] = spell(name)
    plain = list(visible)
    for token, added in backend.get_added_tokens_decoder().items():
        visible[token] = added.content.encode()
        plain[token] = b"" if added.special else visible[token]
    return ByteTable(visible, plain, strip)


def _level_bytes(name: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in name])
    except KeyError:  # not spelled in the alphabet: it stands for itself
        return name.encode()


def _fallback_bytes(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return name.encode()
    return name.replace(SPACE, " ").encode()
