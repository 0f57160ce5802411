"""How model families write calls. Owns: one reader of a single call for each family.

A call is given out when it is complete and its arguments are a JSON object; everything else after
a marker is text, as the model wrote it. Harmony is different enough to have `tools_harmony`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moestro.server.tools_deltas import Broken, Call, Cut, Sink, call_of, loads
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
    value,
)

Schemas = Mapping[str, Mapping[str, Any]]  # function name -> its parameters
Body = Callable[[Reader, str], Steps[Sequence[Call]]]

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEP = "<｜tool▁sep｜>"  # noqa: RUF001
LONGEST_NAME = 256


def marked(markers: Sequence[str], body: Body) -> Script:
    """Return the script of a family whose calls stand between text, each behind a marker."""

    def script(r: Reader, out: Sink) -> Steps[None]:
        while found := (yield from prose(r, out.said, markers)):
            try:
                calls = yield from body(r, found.word)
            except Cut:
                out.said(r.text[found.start :])
                return
            except Broken:
                out.said(r.text[found.start : found.end])
                r.pos = found.end
                continue
            for call in calls:
                out.call(call)
        if not (out.calls and out.fresh and not r.text[r.pos :].strip()):
            out.said(r.rest())

    return script


def hermes(_schemas: Schemas) -> Script:
    """Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`."""

    def body(r: Reader, _word: str) -> Steps[Sequence[Call]]:
        yield from spaces(r)
        return [(yield from _json_call(r))]

    return marked((TOOL_CALL,), body)


def _json_call(r: Reader) -> Steps[Call]:
    call = _named((yield from value(r)))
    yield from close(r, TOOL_CALL_END)
    return call


def _named(found: Any) -> Call:
    if not isinstance(found, dict):
        raise Broken
    return call_of(found.get("name"), found.get("arguments", found.get("parameters")))


def qwen3_coder(schemas: Schemas) -> Script:
    """Qwen3-Coder: `<function=f><parameter=p>value</parameter></function>`, in a tool_call or not.

    Values have no quotes: the schema of the parameter says what they are.
    """

    def body(r: Reader, word: str) -> Steps[Sequence[Call]]:
        if word == TOOL_CALL:
            yield from spaces(r)
            if (yield from peek(r)) == "{":
                return [(yield from _json_call(r))]
            if not (yield from literal(r, FUNCTION)):
                raise Cut if r.ended and FUNCTION.startswith(r.text[r.pos :]) else Broken
        name = (yield from until(r, ">", LONGEST_NAME)).strip()
        arguments = yield from _parameters(r, schemas.get(name, {}))
        yield from close(r, TOOL_CALL_END)
        return [call_of(name, arguments)]

    return marked((TOOL_CALL, FUNCTION), body)


def _parameters(r: Reader, schema: Mapping[str, Any]) -> Steps[dict[str, Any]]:
    properties = schema.get("properties")
    found: dict[str, Any] = {}
    while True:
        yield from spaces(r)
        yield from peek(r)
        if (yield from literal(r, FUNCTION_END)):
            return found
        if not (yield from literal(r, PARAMETER)):
            raise Cut if r.ended and _begun(r, FUNCTION_END, PARAMETER) else Broken
        name = (yield from until(r, ">", LONGEST_NAME)).strip()
        text = yield from until(r, PARAMETER_END)
        text = text.removeprefix("\n").removesuffix("\n")
        wanted = properties.get(name) if isinstance(properties, dict) else None
        found[name] = _typed(text, wanted)


def _begun(r: Reader, *words: str) -> bool:
    return any(word.startswith(r.text[r.pos :]) for word in words)


def _typed(text: str, schema: Any) -> Any:
    """Return the value that `text` stands for; a string where the schema allows or says nothing."""
    kinds = _kinds(schema)
    if not kinds or ("string" in kinds and not ("null" in kinds and text.strip() == "null")):
        return text
    plain = text.strip()
    if "boolean" in kinds and plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    try:
        return loads(plain)
    except Broken:
        return text


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind if isinstance(kind, list) else ())
    for key in ("anyOf", "oneOf"):
        several = schema.get(key)
        for each in several if isinstance(several, list) else ():
            found |= _kinds(each)
    return found


NAME = re.compile(r"[^\s\[\]{}]")


def mistral(_schemas: Schemas) -> Script:
    """Mistral: `[TOOL_CALLS][{..}, ..]`, and since v11 `[TOOL_CALLS]name[ARGS]{..}` for each."""

    def body(r: Reader, _word: str) -> Steps[Sequence[Call]]:
        yield from spaces(r)
        if (yield from peek(r)) == "[":
            listed = yield from value(r)
            return [_named(each) for each in listed]
        start = r.pos
        while NAME.match((yield from peek(r))) and r.pos - start <= LONGEST_NAME:
            r.pos += 1
        name = r.text[start : r.pos]
        if (yield from literal(r, CALL_ID)):
            while (yield from peek(r)) != "[":
                r.pos += 1
        yield from literal(r, ARGS)
        yield from spaces(r)
        return [call_of(name, (yield from value(r)))]

    return marked((TOOL_CALLS,), body)


def deepseek(_schemas: Schemas) -> Script:
    """DeepSeek: V2 and V3 write `function SEP name`, then a fence; V3.1 writes `name SEP {..}`."""

    def body(r: Reader, word: str) -> Steps[Sequence[Call]]:
        if word == CALLS_END:
            return ()
        if word == CALLS_BEGIN:
            yield from spaces(r)
            yield from peek(r)
            if not (yield from literal(r, CALL_BEGIN)):
                raise Cut if r.ended and _begun(r, CALL_BEGIN) else Broken
        name = (yield from until(r, SEP, LONGEST_NAME)).strip()
        fenced = name == "function" and (yield from peek(r)) != "{"
        if fenced:
            name = (yield from until(r, "\n", LONGEST_NAME)).strip()
            yield from close(r, "```json")
        yield from spaces(r)
        found = yield from value(r)
        if fenced:
            yield from close(r, "```")
        yield from close(r, CALL_END)
        return [call_of(name, found)]

    return marked((CALLS_BEGIN, CALL_BEGIN, CALLS_END), body)
