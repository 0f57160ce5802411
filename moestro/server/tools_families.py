"""How model families write calls as JSON. Owns: one reader of a single call for each family.

A call is told as soon as its name and the beginning of its arguments are there; what never gets
that far is text, as the model wrote it. Other ways to write calls have `tools_xml` and
`tools_harmony`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moestro.server.tools_deltas import Broken, Cut, Sink
from moestro.server.tools_json import arguments, json_call
from moestro.server.tools_reader import (
    Reader,
    Script,
    Steps,
    close,
    literal,
    peek,
    prose,
    spaces,
    until,
)

Schemas = Mapping[str, Mapping[str, Any]]  # function name -> its parameters
Body = Callable[[Reader, str, Sink], Steps[None]]

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEP = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE, FENCE_END = "```json", "```"
LONGEST_NAME = 256


def marked(markers: Sequence[str], body: Body) -> Script:
    """Return the script of a family whose calls stand between text, each behind a marker.

    `body` raises `Broken` or `Cut` only while it has told nothing.
    """

    def script(r: Reader, out: Sink) -> Steps[None]:
        while found := (yield from prose(r, out.said, markers)):
            try:
                yield from body(r, found.word, out)
            except Cut:
                out.said(r.text[found.start :])
                return
            except Broken:
                out.said(r.text[found.start : found.end])
                r.pos = found.end
        if not (out.calls and out.fresh and not r.text[r.pos :].strip()):
            out.said(r.rest())

    return script


def hermes(_schemas: Schemas) -> Script:
    """Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`."""

    def body(r: Reader, _word: str, out: Sink) -> Steps[None]:
        yield from spaces(r)
        yield from json_call(r, out, (TOOL_CALL_END,))
        yield from close(r, TOOL_CALL_END)

    return marked((TOOL_CALL,), body)


NAME = re.compile(r"[^\s\[\]{}]")


def mistral(_schemas: Schemas) -> Script:
    """Mistral: `[TOOL_CALLS][{..}, ..]`, and since v11 `[TOOL_CALLS]name[ARGS]{..}` for each."""

    def body(r: Reader, _word: str, out: Sink) -> Steps[None]:
        yield from spaces(r)
        if (yield from peek(r)) == "[":
            yield from _list(r, out)
            return
        start = r.pos
        while NAME.match((yield from peek(r))) and r.pos - start <= LONGEST_NAME:
            r.pos += 1
        name = r.text[start : r.pos]
        if (yield from literal(r, CALL_ID)):
            while (yield from peek(r)) != "[":
                r.pos += 1
        yield from literal(r, ARGS)
        yield from spaces(r)
        yield from arguments(r, out, name, (TOOL_CALLS,))

    return marked((TOOL_CALLS,), body)


def _list(r: Reader, out: Sink) -> Steps[None]:
    """Tell a list of calls; behind the first one, what is no call is left for text."""
    told = out.calls
    r.pos += 1
    while True:
        start = r.pos
        yield from spaces(r)
        if (yield from literal(r, "]")):
            return
        if out.calls > told and not (yield from literal(r, ",")):
            return
        try:
            yield from spaces(r)
            yield from json_call(r, out, (TOOL_CALLS,))
        except (Broken, Cut):
            if out.calls == told:
                raise
            r.pos = start
            return


def deepseek(_schemas: Schemas) -> Script:
    """DeepSeek: V2 and V3 write `function SEP name`, then a fence; V3.1 writes `name SEP {..}`."""

    def body(r: Reader, word: str, out: Sink) -> Steps[None]:
        if word == CALLS_END:
            return
        if word == CALLS_BEGIN:
            yield from spaces(r)
            yield from peek(r)
            if not (yield from literal(r, CALL_BEGIN)):
                raise Cut if r.ended and CALL_BEGIN.startswith(r.text[r.pos :]) else Broken
        name = (yield from until(r, SEP, LONGEST_NAME)).strip()
        fenced = name == "function" and (yield from peek(r)) != "{"
        if fenced:
            name = (yield from until(r, "\n", LONGEST_NAME)).strip()
            yield from close(r, FENCE)
        yield from spaces(r)
        yield from arguments(r, out, name, (CALL_END,))
        if fenced:
            yield from close(r, FENCE_END)
        yield from close(r, CALL_END)

    return marked((CALLS_BEGIN, CALL_BEGIN, CALLS_END), body)
