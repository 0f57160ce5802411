"""An answer taken apart while it grows. Owns: the order of the parsers and what a request wants
to see of their deltas. Does not own: the parsers, or stop strings, which act before on the text as
the model wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moestro.server.reasoning import reasoning
from moestro.server.reasoning_count import (
    BytesOf,
    HarmonyReasoning,
    MarkedReasoning,
    ReasoningCounter,
)
from moestro.server.tools_choose import HARMONY, MARKS, TOOL_PARSERS, markers_of
from moestro.server.tools_deltas import Called, Delta, Said, Sink, Thought, mistral_id
from moestro.server.tools_harmony import harmony
from moestro.server.tools_reader import Parser


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of one call are taken apart. Parsers by name, see `tools_choose`."""

    tools: str = "none"
    reasoning: str = "none"
    callable: bool = False  # the request brought tools, and they may be called
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    opened: bool = False  # the prompt ends inside the reasoning
    parallel: bool = True  # False: only the first call is told
    named: bool = False  # the request named the one function to call
    show_reasoning: bool = True

    @property
    def keep(self) -> frozenset[str]:
        """The markers: special tokens among them must reach the parsers as text."""
        tools = self.tools if self.callable or self.tools == HARMONY else "none"
        return markers_of(tools, self.reasoning)

    def counter(self, bytes_of: BytesOf) -> ReasoningCounter | None:
        """Return what counts the reasoning of one choice; None when it is not told apart."""
        if self.reasoning == HARMONY:
            return HarmonyReasoning(bytes_of)
        marks = MARKS.get(self.reasoning)
        return MarkedReasoning(marks, bytes_of, opened=self.opened) if marks is not None else None

    def start(self) -> Answer:
        """Return the parser of one choice."""
        return Answer(self)

    def stages(self) -> list[Parser]:
        """Return the parsers; the text that one gives out goes into the next."""
        if HARMONY in (self.tools, self.reasoning):
            calls = self.callable and self.tools == HARMONY
            return [Parser(harmony(thoughts=self.reasoning == HARMONY, calls=calls))]
        stages: list[Parser] = []
        marks = MARKS.get(self.reasoning)
        if marks is not None:
            stages.append(Parser(reasoning(marks, opened=self.opened)))
        if self.callable and self.tools in TOOL_PARSERS:
            sink = Sink(mistral_id) if self.tools == "mistral" else Sink()
            stages.append(Parser(TOOL_PARSERS[self.tools][0](self.schemas), sink))
        return stages


class Answer:
    """One choice's parsers. After `finish` it is spent."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._stages = form.stages()
        self.called = False  # a call was told

    @property
    def ended_to_call(self) -> bool:
        """Whether an answer that ends here ends to call: with calls, the last one complete.

        An answer to a request that named its function never does: that is what the API says.
        """
        return self.called and not self._form.named and not any(s.writing for s in self._stages)

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that can be told now."""
        deltas: list[Delta] = [Said(text)] if text else []
        for stage in self._stages:
            deltas = _through(stage, deltas)
        return self._shown(deltas)

    def finish(self) -> list[Delta]:
        """Return the deltas that waited for the end."""
        deltas: list[Delta] = []
        for stage in self._stages:
            deltas = _through(stage, deltas) + stage.finish()
        return self._shown(deltas)

    def _shown(self, deltas: list[Delta]) -> list[Delta]:
        shown = [delta for delta in deltas if self._wanted(delta)]
        self.called = self.called or any(isinstance(delta, Called) for delta in shown)
        return shown

    def _wanted(self, delta: Delta) -> bool:
        if isinstance(delta, Thought):
            return self._form.show_reasoning
        return isinstance(delta, Said) or self._form.parallel or delta.index == 0


def _through(stage: Parser, deltas: list[Delta]) -> list[Delta]:
    out: list[Delta] = []
    for delta in deltas:
        out += stage.feed(delta.text) if isinstance(delta, Said) else [delta]
    return out
