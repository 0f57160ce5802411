"""Chat completions on the wire. Owns: the chunks and the body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from moestro.server.call import Call
from moestro.server.choice import Piece
from moestro.server.chunk_wire import ChunkWire
from moestro.server.generation import Generation
from moestro.server.logprobs import chat_logprobs
from moestro.server.reply import usage_json
from moestro.server.tokenizer import Tokenizer
from moestro.server.tools_wire import delta_json, finish_reason, message_json
from moestro.server.wire import dump, quote
from moestro.types import Finish


class ChatWire(ChunkWire):
    """Spells one chat call."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        super().__init__(call, tokenizer, "chat.completion.chunk")
        form = call.output.format
        self._answers = [form.start() for _ in call.requests] if form is not None else []
        more = call.output.detailed or call.output.continuous_usage
        self._plain = form is None and not more  # a piece is its text and nothing else

    def first(self, generation: Generation, index: int) -> str:
        """Return the role chunk; the very first one also brings the prompt's ids when asked."""
        choice = (
            f'{{"index":{index},"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}]'
        )
        ids = ""
        if index == 0 and self._output.token_ids:
            ids = f',"prompt_token_ids":{dump(self._call.prompts[0].ids)}'
        return f"{self._head}{choice}{ids}{self._usage(generation)}}}\n\n"

    def piece(self, generation: Generation, index: int, piece: Piece) -> str:
        """Return the chunks of what can be told, and the finish chunk at the end."""
        if self._plain and piece.finish is None:  # the same as below, for by far the most
            if not piece.text:
                return ""
            return (
                f'{self._head}{{"index":{index},"delta":{{"content":{quote(piece.text)}}},'
                f'"logprobs":null,"finish_reason":null}}]}}\n\n'
            )
        out = ""
        extra = f'"logprobs":{self._logprobs(piece)},"finish_reason":null{self._ids(piece)}'
        for delta in self._deltas(index, piece):
            out += (
                f'{self._head}{{"index":{index},"delta":{delta},{extra}}}]'
                f"{self._usage(generation)}}}\n\n"
            )
            extra = '"logprobs":null,"finish_reason":null'  # tokens ride with the first one
        if piece.finish is not None:
            reason = self._finish(index, piece.finish)
            out += (
                f'{self._head}{{"index":{index},"delta":{{}},"logprobs":null,'
                f'"finish_reason":"{reason}","stop_reason":{dump(piece.stop_reason)}}}]'
                f"{self._usage(generation)}}}\n\n"
            )
        return out

    def _deltas(self, index: int, piece: Piece) -> list[str]:
        """Return the deltas' JSON; one without text where only tokens are to be told."""
        if self._answers:
            answer = self._answers[index]
            told = answer.feed(piece.text)
            if piece.finish is not None:
                told += answer.finish()
            deltas = [delta_json(delta) for delta in told]
        else:
            deltas = [f'{{"content":{quote(piece.text)}}}'] if piece.text else []
        if not deltas and (piece.logprobs or (piece.ids and self._output.token_ids)):
            return ['{"content":""}']
        return deltas

    def _finish(self, index: int, finish: Finish) -> str:
        called = bool(self._answers) and self._answers[index].ended_to_call
        return finish_reason(finish, called=called)

    def whole(self, generation: Generation, pieces: list[list[Piece]]) -> dict[str, Any]:
        """Return a `chat.completion` object."""
        body: dict[str, Any] = {
            "id": self._call.id,
            "object": "chat.completion",
            "created": self._call.created,
            "model": self._call.model,
            "choices": [self._choice(i, parts) for i, parts in enumerate(pieces)],
            "usage": usage_json(generation.usage()),
            "system_fingerprint": None,
            "service_tier": None,
        }
        if self._output.token_ids:
            body["prompt_token_ids"] = self._call.prompts[0].ids
        return body

    def _choice(self, index: int, parts: list[Piece]) -> dict[str, Any]:
        last = parts[-1]
        assert last.finish is not None
        choice: dict[str, Any] = {
            "index": index,
            "message": self._message(index, "".join(part.text for part in parts)),
            "logprobs": None,
            "finish_reason": self._finish(index, last.finish),
            "stop_reason": last.stop_reason,
        }
        if self._output.logprobs is not None:
            scored = [lp for part in parts for lp in part.logprobs]
            choice["logprobs"] = chat_logprobs(self._speller, scored, self._output.logprobs)
        if self._output.token_ids:
            choice["token_ids"] = [token for part in parts for token in part.ids]
        return choice

    def _message(self, index: int, text: str) -> dict[str, Any]:
        if not self._answers:
            return {"role": "assistant", "content": text, "refusal": None}
        answer = self._answers[index]
        return message_json(answer.feed(text) + answer.finish())

    def _logprobs(self, piece: Piece) -> str:
        if self._output.logprobs is None:
            return "null"
        return dump(chat_logprobs(self._speller, piece.logprobs, self._output.logprobs))

    def _ids(self, piece: Piece) -> str:
        return f',"token_ids":{dump(piece.ids)}' if self._output.token_ids else ""
