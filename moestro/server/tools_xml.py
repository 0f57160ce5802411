"""Calls whose arguments stand between tags. Owns: the reader of Qwen3-Coder's calls.

Values have no quotes: the schema of the parameter says what they are. Arguments are told parameter
by parameter, each when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moestro.server.tools_deltas import Broken, Call, Cut, Sink, dumped, loads
from moestro.server.tools_families import (
    LONGEST_NAME,
    TOOL_CALL,
    TOOL_CALL_END,
    Schemas,
    marked,
)
from moestro.server.tools_json import json_call
from moestro.server.tools_reader import Reader, Script, Steps, close, literal, peek, spaces, until
from moestro.server.tools_schema import BOOLEAN, NULL, STRING, kinds_of

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def qwen3_coder(schemas: Schemas) -> Script:
    """Qwen3-Coder: `<function=f><parameter=p>value</parameter></function>`, bare or in marks."""

    def body(r: Reader, word: str, out: Sink) -> Steps[None]:
        if word == TOOL_CALL:
            yield from spaces(r)
            if (yield from peek(r)) == "{":
                yield from json_call(r, out, (TOOL_CALL_END,))
                yield from close(r, TOOL_CALL_END)
                return
            if not (yield from literal(r, FUNCTION)):
                raise Cut if r.ended and FUNCTION.startswith(r.text[r.pos :]) else Broken
        name = (yield from until(r, ">", LONGEST_NAME)).strip()
        if not name:
            raise Broken
        yield from _parameters(r, out, name, schemas.get(name, {}))
        yield from close(r, TOOL_CALL_END)

    return marked((TOOL_CALL, FUNCTION), body)


def _parameters(r: Reader, out: Sink, name: str, schema: Mapping[str, Any]) -> Steps[None]:
    """Tell a call. Once it was begun, a cut drops what is incomplete and a break leaves text."""
    told = out.calls
    while True:
        start = r.pos
        try:
            found = yield from _parameter(r, schema)
        except (Broken, Cut) as problem:
            if out.calls == told:
                raise
            r.pos = len(r.text) if isinstance(problem, Cut) else start
            return
        if found is not None:
            if out.calls == told:
                out.begin(name)
                out.more("{" + found)
            else:
                out.more(", " + found)
        elif out.calls == told:
            out.call(Call(name, "{}"))
            return
        else:
            out.more("}")
            out.end()
            return


def _parameter(r: Reader, schema: Mapping[str, Any]) -> Steps[str | None]:
    """Return the next parameter as a member of a JSON object; None at the function's end."""
    yield from spaces(r)
    yield from peek(r)
    if (yield from literal(r, FUNCTION_END)):
        return None
    if not (yield from literal(r, PARAMETER)):
        begun = any(word.startswith(r.text[r.pos :]) for word in (FUNCTION_END, PARAMETER))
        raise Cut if r.ended and begun else Broken
    name = (yield from until(r, ">", LONGEST_NAME)).strip()
    text = (yield from until(r, PARAMETER_END)).removeprefix("\n").removesuffix("\n")
    properties = schema.get("properties")
    wanted = properties.get(name) if isinstance(properties, dict) else None
    return f"{json.dumps(name, ensure_ascii=False)}: {_typed(text, wanted, schema)}"


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Return the JSON of the value; a string where the schema allows one or says nothing."""
    kinds = kinds_of(schema, root)
    plain = text.strip()
    if NULL in kinds and plain == "null":
        return plain
    if not kinds or STRING in kinds:
        return dumped(text)
    if BOOLEAN in kinds and plain.lower() in ("true", "false"):
        return plain.lower()
    try:
        return dumped(loads(plain))
    except Broken:
        return dumped(text)
