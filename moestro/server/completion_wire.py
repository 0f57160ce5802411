"""Plain completions on the wire. Owns: the chunks and the body of /v1/completions."""

from __future__ import annotations

from typing import Any

from moestro.server.call import Call, Prompt
from moestro.server.choice import Piece
from moestro.server.chunk_wire import ChunkWire
from moestro.server.generation import Generation
from moestro.server.logprobs import PlainLogprobs, offsets_of
from moestro.server.reply import usage_json
from moestro.server.tokenizer import Tokenizer
from moestro.server.wire import dump, quote


class CompletionWire(ChunkWire):
    """Spells one completions call. Choice index = prompt index * n + choice of that prompt."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        super().__init__(call, tokenizer, "text_completion")
        self._tokenizer = tokenizer

    def first(self, generation: Generation, index: int) -> str:
        """Return a chunk with what belongs to the prompt: its text, logprobs and ids if asked."""
        if not (self._output.echo or self._output.token_ids):
            return ""
        prompt = self._prompt(index)
        text = prompt.text if self._output.echo else ""
        logprobs = dump(self._prompt_logprobs(generation, index)) if self._scores_prompt else "null"
        extra = ""
        if self._output.token_ids:
            extra = f',"prompt_token_ids":{dump(prompt.ids)},"token_ids":[]'
        return self._chunk(generation, index, text, logprobs, "null", extra)

    def piece(self, generation: Generation, index: int, piece: Piece) -> str:
        """Return one chunk; the finish reason rides on the last text of a choice."""
        ids = self._output.token_ids and piece.ids
        if not (piece.text or piece.logprobs or ids or piece.finish is not None):
            return ""
        logprobs = "null"
        if self._output.logprobs is not None and piece.logprobs:
            found = PlainLogprobs.empty()
            self._add(found, index, piece)
            logprobs = dump(found.as_json())
        extra = f',"token_ids":{dump(piece.ids)}' if self._output.token_ids else ""
        finish = "null"
        if piece.finish is not None:
            finish = f'"{piece.finish.value}"'
            extra += f',"stop_reason":{dump(piece.stop_reason)}'
        return self._chunk(generation, index, piece.text, logprobs, finish, extra)

    def whole(self, generation: Generation, pieces: list[list[Piece]]) -> dict[str, Any]:
        """Return a `text_completion` object."""
        return {
            "id": self._call.id,
            "object": "text_completion",
            "created": self._call.created,
            "model": self._call.model,
            "choices": [self._choice(generation, i, parts) for i, parts in enumerate(pieces)],
            "usage": usage_json(generation.usage()),
            "system_fingerprint": None,
        }

    def _chunk(
        self, generation: Generation, index: int, text: str, logprobs: str, finish: str, extra: str
    ) -> str:
        return (
            f'{self._head}{{"index":{index},"text":{quote(text)},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{extra}}}]{self._usage(generation)}}}\n\n'
        )

    def _choice(self, generation: Generation, index: int, parts: list[Piece]) -> dict[str, Any]:
        last = parts[-1]
        assert last.finish is not None
        prompt = self._prompt(index)
        text = "".join(part.text for part in parts)
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt.text + text if self._output.echo else text,
            "logprobs": None,
            "finish_reason": last.finish.value,
            "stop_reason": last.stop_reason,
        }
        if self._output.logprobs is not None:
            found = PlainLogprobs.empty()
            if self._scores_prompt:
                self._add_prompt(found, generation, index)
            for part in parts:
                self._add(found, index, part)
            choice["logprobs"] = found.as_json()
        if self._output.token_ids:
            choice["prompt_token_ids"] = prompt.ids
            choice["token_ids"] = [token for part in parts for token in part.ids]
        return choice

    def _prompt(self, index: int) -> Prompt:
        return self._call.prompts[index // self._call.n]

    @property
    def _scores_prompt(self) -> bool:
        return self._output.echo and self._output.logprobs is not None

    def _prompt_logprobs(self, generation: Generation, index: int) -> dict[str, Any]:
        found = PlainLogprobs.empty()
        self._add_prompt(found, generation, index)
        return found.as_json()

    def _add_prompt(self, found: PlainLogprobs, generation: Generation, index: int) -> None:
        prompt = self._prompt(index)
        scores = generation.prompt_logprobs.get(index // self._call.n, ())
        ids = prompt.ids[: len(scores)]
        offsets = offsets_of(self._tokenizer, ids, skip_special=self._output.skip_special)
        inside = [min(offset, len(prompt.text)) for offset in offsets]
        assert self._output.logprobs is not None
        found.add_prompt(self._speller, ids, scores, inside, self._output.logprobs)

    def _add(self, found: PlainLogprobs, index: int, piece: Piece) -> None:
        base = len(self._prompt(index).text) if self._output.echo else 0
        offsets = [base + offset for offset in piece.offsets]
        assert self._output.logprobs is not None
        found.add(self._speller, piece.logprobs, offsets, self._output.logprobs)
