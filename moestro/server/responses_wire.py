"""Responses on the wire. Owns: the response object, its items, and the events of a stream."""

from __future__ import annotations

import secrets
import time
from typing import Any

from moestro.errors import MoestroError
from moestro.server.call import Call
from moestro.server.choice import Piece
from moestro.server.generation import Generation
from moestro.server.logprobs import Speller, chat_logprobs
from moestro.server.responses_input import seal
from moestro.server.tokenizer import Tokenizer
from moestro.server.transcript import Block, Closed, Grown, Opened, Step, Transcript
from moestro.server.wire import event
from moestro.types import Finish, TokenLogprobs

Json = dict[str, Any]

ITEM_PREFIX = {"thought": "rs_", "text": "msg_", "call": "fc_"}
DELTA = {
    "thought": "response.reasoning_text.delta",
    "text": "response.output_text.delta",
    "call": "response.function_call_arguments.delta",
}


class ResponsesWire:
    """Spells one response. `call.shown` has what it repeats, and whether reasoning is `sealed`."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._transcript = Transcript(call)
        self._speller = Speller(tokenizer)
        self._shown = dict(call.shown)
        self._sealed = bool(self._shown.pop("sealed", False))
        self._ids: list[str] = []  # of the items
        self._done: list[Json] = []  # items that are complete
        self._sequence = 0

    def start(self, generation: Generation) -> str:
        """Return the two events that announce the response."""
        body = self._response("in_progress")
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def first(self, generation: Generation, index: int) -> str:
        """Return nothing: an item announces itself."""
        return ""

    def piece(self, generation: Generation, index: int, piece: Piece) -> str:
        """Return the events of items that begin, grow and end."""
        return "".join(self._step(step) for step in self._transcript.add(piece))

    def end(self, generation: Generation) -> str:
        """Return the event with the whole response."""
        body = self._finished(generation)
        return self._event(f"response.{body['status']}", response=body)

    def failed(self, generation: Generation, error: MoestroError) -> str:
        """Return the event that says why the response ends here."""
        code = "invalid_prompt" if error.kind == "invalid_request_error" else "server_error"
        open_items = self._transcript.blocks[len(self._done) :]
        output = [*self._done, *(self._item(block, "incomplete") for block in open_items)]
        body = self._response("failed", output) | {
            "error": {"code": code, "message": error.message},
            "usage": self._usage(generation),
        }
        return self._event("response.failed", response=body)

    def whole(self, generation: Generation, pieces: list[list[Piece]]) -> Json:
        """Return the response object."""
        for piece in pieces[0]:
            for step in self._transcript.add(piece):
                if isinstance(step, Opened):
                    self._open(step.block)
                elif isinstance(step, Closed):
                    self._close(step.block)
        return self._finished(generation)

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **fields})

    def _step(self, step: Step) -> str:
        block = step.block
        if isinstance(step, Opened):
            self._open(block)
            item = self._item(block, "in_progress")
            out = self._event("response.output_item.added", output_index=block.index, item=item)
            return out + self._part(block, "added")
        at = self._at(block)
        if isinstance(step, Grown):
            if block.kind == "text":
                at["logprobs"] = self._logprobs(step.logprobs)
            return self._event(DELTA[block.kind], **at, delta=step.text)
        out = self._text_done(block, at) + self._part(block, "done")
        item = self._close(block)
        return out + self._event("response.output_item.done", output_index=block.index, item=item)

    def _open(self, block: Block) -> None:
        self._ids.append(ITEM_PREFIX[block.kind] + secrets.token_hex(12))

    def _close(self, block: Block) -> Json:
        item = self._item(block, "incomplete" if block.cut else "completed")
        self._done.append(item)
        return item

    def _at(self, block: Block) -> Json:
        at: Json = {"item_id": self._ids[block.index], "output_index": block.index}
        return at if block.kind == "call" else at | {"content_index": 0}

    def _text_done(self, block: Block, at: Json) -> str:
        kind = DELTA[block.kind].removesuffix("delta") + "done"
        if block.call is not None:
            return self._event(kind, **at, name=block.call.name, arguments=block.text)
        if block.kind == "text":
            at = at | {"logprobs": self._logprobs(block.logprobs)}
        return self._event(kind, **at, text=block.text)

    def _part(self, block: Block, what: str) -> str:
        """Return the event about an item's one content part; calls have none."""
        if block.kind == "call":
            return ""
        kind = f"response.content_part.{what}"
        shown = Block(block.index, block.kind) if what == "added" else block
        return self._event(kind, **self._at(block), part=self._content(shown))

    def _content(self, block: Block) -> Json:
        if block.kind == "thought":
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._logprobs(block.logprobs),
        }

    def _item(self, block: Block, status: str) -> Json:
        """Return an item; one in progress is still empty."""
        id = self._ids[block.index]
        begun = status == "in_progress"
        if block.call is not None:
            return {
                "id": id,
                "type": "function_call",
                "status": status,
                "call_id": block.call.id,
                "name": block.call.name,
                "arguments": "" if begun else block.text,
            }
        content = [] if begun else [self._content(block)]
        if block.kind == "text":
            return {
                "id": id,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": content,
            }
        sealed = seal(block.text) if self._sealed and content else None
        return {
            "id": id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
            "encrypted_content": sealed,
        }

    def _logprobs(self, logprobs: tuple[TokenLogprobs, ...] | list[TokenLogprobs]) -> list[Json]:
        top = self._call.output.logprobs
        if top is None:
            return []
        content: list[Json] = chat_logprobs(self._speller, logprobs, top)["content"]
        return content

    def _usage(self, generation: Generation) -> Json:
        usage = generation.usage()
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _finished(self, generation: Generation) -> Json:
        cut = self._transcript.finish is Finish.LENGTH
        body = self._response("incomplete" if cut else "completed", self._done)
        body["usage"] = self._usage(generation)
        if cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        return body

    def _response(self, status: str, output: list[Json] | None = None) -> Json:
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._call.created,
            "completed_at": None,
            "status": status,
            "model": self._call.model,
            "error": None,
            "incomplete_details": None,
            "output": output or [],
            "usage": None,
            **self._shown,
        }
