"""Messages on the wire. Owns: the message object, its content blocks, and a stream's events."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from moestro.errors import MoestroError
from moestro.server import messages_problems
from moestro.server.call import Call
from moestro.server.choice import Piece
from moestro.server.generation import Generation
from moestro.server.tokenizer import Tokenizer
from moestro.server.transcript import Block, Grown, Opened, Step, Transcript
from moestro.server.wire import event
from moestro.types import Finish

Json = dict[str, Any]

DELTA = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesWire:
    """Spells one message."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._call = call
        self._transcript = Transcript(call)

    def start(self, generation: Generation) -> str:
        """Return the message without content. What of the prompt was reused is told at the end."""
        usage = _usage(self._call.prompt_tokens, 0, 0, 0)
        message = self._message([], None, None, usage)
        return event({"type": "message_start", "message": message}) + event({"type": "ping"})

    def first(self, generation: Generation, index: int) -> str:
        """Return nothing: a block announces itself."""
        return ""

    def piece(self, generation: Generation, index: int, piece: Piece) -> str:
        """Return the events of blocks that begin, grow and end."""
        return "".join(_step(step) for step in self._transcript.add(piece))

    def end(self, generation: Generation) -> str:
        """Return why the message ends, its usage, and the end."""
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        told = {"type": "message_delta", "delta": delta, "usage": self._used(generation)}
        return event(told) + event({"type": "message_stop"})

    def failed(self, generation: Generation, error: MoestroError) -> str:
        """Return the error, which ends a stream."""
        return messages_problems.event_of(error)

    def whole(self, generation: Generation, pieces: list[list[Piece]]) -> Json:
        """Return the message object."""
        for piece in pieces[0]:
            self._transcript.add(piece)
        content = [_whole(block) for block in self._transcript.blocks]
        return self._message(content, *self._stop(), self._used(generation))

    def _message(
        self, content: list[Json], reason: str | None, sequence: str | None, usage: Json
    ) -> Json:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _stop(self) -> tuple[str, str | None]:
        found = self._transcript
        if isinstance(found.stop_reason, str):
            return "stop_sequence", found.stop_reason
        if found.finish is Finish.LENGTH:
            return "max_tokens", None
        return "tool_use" if found.called else "end_turn", None

    def _used(self, generation: Generation) -> Json:
        usage = generation.usage()
        return _usage(usage.prompt, usage.cached, usage.completion, usage.reasoning)


def _usage(prompt: int, cached: int, output: int, thinking: int) -> Json:
    """Return the `usage` object; what was read from the cache is not part of the input."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


def _step(step: Step) -> str:
    block = step.block
    if isinstance(step, Opened):
        return event(
            {"type": "content_block_start", "index": block.index, "content_block": _empty(block)}
        )
    if isinstance(step, Grown):
        kind, field = DELTA[block.kind]
        return _delta(block, {"type": kind, field: step.text})
    out = ""
    if block.kind == "thought":
        out = _delta(block, {"type": "signature_delta", "signature": _signature(block)})
    return out + event({"type": "content_block_stop", "index": block.index})


def _delta(block: Block, delta: Json) -> str:
    return event({"type": "content_block_delta", "index": block.index, "delta": delta})


def _empty(block: Block) -> Json:
    if block.call is not None:
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> Json:
    if block.call is not None:
        return _empty(block) | {"input": _object(block.text)}
    if block.kind == "thought":
        return _empty(block) | {"thinking": block.text, "signature": _signature(block)}
    return _empty(block) | {"text": block.text}


def _object(arguments: str) -> Json:
    """Return a call's arguments; nothing where the answer was cut inside them."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _signature(block: Block) -> str:
    """Return a checksum. Clients hand back only thinking that has a signature; none is checked."""
    return hashlib.sha256(block.text.encode("utf-8", "replace")).hexdigest()
