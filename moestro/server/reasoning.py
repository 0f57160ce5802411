"""Reasoning told apart from the answer. Owns: the markers around it and the script that reads them.

Reasoning is what stands between the markers at the start of an answer; a prompt may have opened it
already. Line breaks next to a marker belong to neither side.
"""

from __future__ import annotations

from dataclasses import dataclass

from moestro.server.tools_deltas import Sink
from moestro.server.tools_reader import Reader, Script, Steps, literal, prose, spaces, through

BREAK = "\n"


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands before and after reasoning."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the opening, so that the model is reasoning from the start."""
        return prompt.rstrip().endswith(self.open)

    def left_open_in(self, text: str) -> bool:
        """Whether a message that is to be continued stops inside its reasoning."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK = Marks("<think>", "</think>")
MISTRAL = Marks("[THINK]", "[/THINK]")


def reasoning(marks: Marks, *, opened: bool) -> Script:
    """Return the script; with `opened` the answer begins inside the reasoning."""

    def script(r: Reader, out: Sink) -> Steps[None]:
        if opened or (yield from _opens(r, marks)):
            yield from spaces(r, which=BREAK)
            if (yield from prose(r, out.thought, (marks.close,), BREAK)) is None:
                out.thought(r.rest())
                return
            yield from spaces(r, which=BREAK)
        yield from through(r, out.said)

    return script


def _opens(r: Reader, marks: Marks) -> Steps[bool]:
    start = r.pos
    yield from spaces(r)
    found = yield from literal(r, marks.open)
    if not found:
        r.pos = start
    return found
