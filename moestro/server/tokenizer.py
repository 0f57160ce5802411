"""A checkpoint's tokenizer. Owns: text to ids and ids to text, as the checkpoint defines them.

Every method blocks; callers use the thread pool (`text.Text`). Encoding goes through the batch
call, because that is the one which lets go of the interpreter lock while it works.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from moestro.errors import ModelError
from moestro.server.detokenize import (
    ByteDetokenizer,
    Detokenizer,
    StreamDetokenizer,
    byte_table,
)

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")


class Tokenizer:
    """Wraps `tokenizers.Tokenizer` with the rules that tokenizer_config.json adds to it."""

    def __init__(self, backend: Backend, config: dict[str, Any] | None = None) -> None:
        self._backend = backend
        self.special_tokens = _special_tokens(config or {})
        self._marks = _marks(backend)
        backend.no_truncation()
        backend.no_padding()
        _mark_special(backend, self.special_tokens)
        _set_edges(backend, config or {}, self.special_tokens)
        self._table = byte_table(backend)
        self._kept: dict[frozenset[str], list[bytes]] = {}  # one for each set of markers
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @staticmethod
    def from_checkpoint(folder: Path) -> Tokenizer:
        """Load tokenizer.json, or convert what else there is with transformers.

        Raises `ModelError` when the checkpoint holds no tokenizer that can be read.
        """
        config = read_config(folder)
        path = folder / "tokenizer.json"
        try:
            backend = Backend.from_file(str(path)) if path.is_file() else _convert(folder)
        except ModelError:
            raise
        except Exception as exc:  # the library raises bare Exception
            raise ModelError(f"the tokenizer cannot be read: {exc}") from exc
        return Tokenizer(backend, config)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return token ids; `special` adds what the model expects around a text (BOS, mostly).

        Special tokens spelled out in the text become themselves.
        """
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of `ids`, as a stream of them would give it."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push_many(ids) + detokenizer.flush()

    def detokenizer(
        self,
        *,
        skip_special: bool,
        continuing: bool = False,
        keep: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """Return a decoder for one sequence.

        `continuing` keeps the leading space that some decoders strip: text that goes on after a
        prompt needs it, an answer of its own does not. `keep` are special tokens that have text
        all the same: the markers that a parser looks for.
        """
        if self._table is None:
            hidden = self._special_but(keep) if keep and skip_special else frozenset()
            skip = skip_special and not keep
            return StreamDetokenizer(self._backend, skip_special=skip, hidden=hidden)
        table = self._plain(keep) if skip_special else self._table.visible
        return ByteDetokenizer(table, 0 if continuing else self._table.strip)

    def _plain(self, keep: frozenset[str]) -> list[bytes]:
        assert self._table is not None
        if not keep:
            return self._table.plain
        if keep not in self._kept:
            table = list(self._table.plain)
            for name in keep:
                token = self._backend.token_to_id(name)
                if token is not None:
                    table[token] = name.encode()
            self._kept[keep] = table
        return self._kept[keep]

    def _special_but(self, keep: frozenset[str]) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(i for i, t in added.items() if t.special and t.content not in keep)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for, possibly half a character."""
        if self._table is not None:
            return self._table.bytes_of(token)
        return self._backend.decode([token], skip_special_tokens=False).encode()

    def special_id(self, text: str) -> int | None:
        """Return the id of a token that grammars cannot spell as text; None for any other text."""
        return self._marks.get(text)

    def name_of(self, token: int) -> str:
        """Return the vocabulary's own spelling of a token."""
        return self._backend.id_to_token(token) or ""


def read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json over special_tokens_map.json; missing files count as empty."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise ModelError(f"{name} is not valid JSON: {exc}") from exc
        if not isinstance(content, dict):
            raise ModelError(f"{name} is not a JSON object")
        merged.update({key: value for key, value in content.items() if value is not None})
    return merged


def _convert(folder: Path) -> Backend:
    # Loads torch where it is installed: the price of a checkpoint without tokenizer.json.
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelError(
            "the checkpoint has no tokenizer.json and its tokenizer cannot be converted to one"
        )
    return backend


def _marks(backend: Backend) -> dict[str, int]:
    """Return the tokens that are no text for llguidance: special ones, and all in <>."""
    added = backend.get_added_tokens_decoder()
    return {
        token.content: id
        for id, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Return name -> token, as chat templates get them."""
    named: dict[str, Any] = {}
    for name in NAMED:
        content = _content(config.get(name))
        if content is not None:
            named[name] = content
    for name in EXTRA:
        given = config.get(name)
        if isinstance(given, dict):
            named.update({key: text for key, v in given.items() if (text := _content(v))})
        elif isinstance(given, list):
            named[name] = [text for token in given if (text := _content(token))]
    return named


def _mark_special(backend: Backend, named: dict[str, Any]) -> None:
    """Make the named tokens special. One that is not in the vocabulary has no embedding either."""
    listed = [value if isinstance(value, list) else [value] for value in named.values()]
    known = [text for each in listed for text in each if backend.token_to_id(text) is not None]
    already = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    new = [AddedToken(text, normalized=False) for text in known if text not in already]
    if new:
        backend.add_special_tokens(new)


def _set_edges(backend: Backend, config: dict[str, Any], named: dict[str, Any]) -> None:
    """Apply add_bos_token and add_eos_token, which overrule tokenizer.json when they are given."""
    if not isinstance(config.get("add_bos_token", config.get("add_eos_token")), bool):
        return
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    ids = {text: backend.token_to_id(text) for text in (bos, eos) if text}
    parts = [text for text in (bos, "$A", eos) if text and ids.get(text, 0) is not None]
    backend.post_processor = TemplateProcessing(
        single=" ".join(parts), special_tokens=[(t, i) for t, i in ids.items() if i is not None]
    )
