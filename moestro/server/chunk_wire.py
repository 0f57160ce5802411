"""What chat and plain completions have in common on the wire: chunks with choices, then usage, then
`[DONE]`."""

from __future__ import annotations

from moestro.errors import MoestroError
from moestro.server.call import Call
from moestro.server.generation import Generation
from moestro.server.logprobs import Speller
from moestro.server.problems import event_of
from moestro.server.reply import usage_json, usage_suffix
from moestro.server.tokenizer import Tokenizer
from moestro.server.wire import DONE, dump, quote


class ChunkWire:
    """Spells one call. What all chunks of `kind` share is put together once."""

    def __init__(self, call: Call, tokenizer: Tokenizer, kind: str) -> None:
        self._call = call
        self._output = call.output
        self._speller = Speller(tokenizer, call.output.ids_as_tokens)
        self._head = (
            f'data: {{"id":{quote(call.id)},"object":"{kind}",'
            f'"created":{call.created},"model":{quote(call.model)},"choices":['
        )

    def start(self, generation: Generation) -> str:
        """Return nothing: a stream begins with the first token."""
        return ""

    def end(self, generation: Generation) -> str:
        """Return the chunk without choices that carries the usage, if asked for, and the end."""
        if not self._output.include_usage:
            return DONE
        return f'{self._head}],"usage":{dump(usage_json(generation.usage()))}}}\n\n' + DONE

    def failed(self, generation: Generation, error: MoestroError) -> str:
        """Return the error and the end."""
        return event_of(error) + DONE

    def _usage(self, generation: Generation) -> str:
        return usage_suffix(generation) if self._output.continuous_usage else ""
