"""What a request says about the form of its answer. Owns: all the fields for it, and their checks.

Does not own: what a grammar may hold (`structured_check` finds out), or calls (`tools_request`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moestro.errors import InvalidRequest
from moestro.server.schema import GenerationRequest
from moestro.server.structured_tags import tags_text

MOST_TEXT = 128 * 1024  # characters of a schema, an expression or a grammar
MOST_GBNF = 16 * 1024  # its conversion is slow
SPACE = r"[ ]|\n{1,2}[ \t]{0,40}"  # between JSON tokens: enough to indent, but never endless
GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of an answer must match. `param` is the field that asked for it.

    `lenient`: keywords of a schema that cannot be enforced do not count.
    """

    kind: Literal["json_schema", "regex", "lark", "gbnf", "tags"]
    text: str
    param: str
    lenient: bool = False


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """Return what the answer must match; None when it is free. Raises `InvalidRequest`."""
    found: dict[str, Constraint] = {}
    for name, read in SOURCES.items():
        value = getattr(request, name)
        constraint = read(value, name) if value is not None else None
        if constraint is not None:
            found[name] = constraint
    _only_one(list(found), "")
    return next(iter(found.values()), None)


def _only_one(names: list[str], prefix: str) -> None:
    if len(names) > 1:
        raise InvalidRequest(
            f"'{prefix}{names[0]}' and '{prefix}{names[1]}' exclude each other: give one of them.",
            param=prefix + names[1],
        )


def schema_text(schema: Mapping[str, Any], param: str, *, lenient: bool = False) -> str:
    """Return a JSON schema as llguidance takes it, with bounded white space.

    `lenient`: keywords that cannot be enforced are left out instead of being refused.
    """
    if "x-guidance" in schema:
        raise _wrong(param, "must not have 'x-guidance': it belongs to this server")
    options = {"whitespace_pattern": SPACE, **({"lenient": True} if lenient else {})}
    try:
        text = msgspec.json.encode({**schema, "x-guidance": options}).decode()
    except (RecursionError, UnicodeError, TypeError, ValueError):
        raise _wrong(param, "cannot be written as JSON") from None
    return _bounded(text, param)


def _wrong(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' {what}.", param=param)


def _bounded(text: str, param: str, most: int = MOST_TEXT) -> str:
    if len(text) > most:
        raise _wrong(param, f"may have {most} characters, not {len(text)}")
    return text


def _json(value: Any, param: str, *, lenient: bool = False) -> Constraint:
    """Return the constraint of a schema, given as an object or as its JSON text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(_bounded(value, param))
        except (msgspec.DecodeError, RecursionError, ValueError):
            raise _wrong(param, "is not valid JSON") from None
    if not isinstance(value, dict):
        raise _wrong(param, "must be a JSON schema object")
    return Constraint("json_schema", schema_text(value, param, lenient=lenient), param, lenient)


def _json_object(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, bool):
        raise _wrong(param, "must be true or false")
    return _json(ANY_OBJECT, param) if value else None


def _regex(value: Any, param: str) -> Constraint:
    if not isinstance(value, str) or not value:
        raise _wrong(param, "must be a regular expression, and not empty")
    if (len(value) - len(value.rstrip("\\"))) % 2:
        raise _wrong(param, "ends with a backslash that escapes nothing")
    return Constraint("regex", _bounded(value, param), param)


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not value:
        raise _wrong(param, "must be an array of at least one string")
    if not all(isinstance(each, str) and each for each in value):
        raise _wrong(param, "may only hold strings, and none that is empty")
    if (total := sum(map(len, value))) > MOST_TEXT:
        raise _wrong(param, f"may have {MOST_TEXT} characters in all, not {total}")
    words = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
    return Constraint("lark", _bounded(f"start: CHOICE\nCHOICE: {words}\n", param), param)


def _grammar(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, str):
        raise _wrong(param, "must be a string")
    if not value.strip():
        return None
    if GBNF.search(value):
        return Constraint("gbnf", _bounded(value, param, MOST_GBNF), param)
    return Constraint("lark", _bounded(value, param), param)


def _response_format(value: Any, param: str) -> Constraint | None:
    kind = value.get("type")
    if kind == "text":
        _known(value, param, ("type",))
        return None
    if kind == "json_object":
        _known(value, param, ("type", "schema"))
        schema = value.get("schema")
        return _json(ANY_OBJECT, param) if schema is None else _json(schema, f"{param}.schema")
    if kind == "json_schema":
        return _json_schema(value, param)
    if kind == "structural_tag":
        return _structural_tag(value, param)
    kinds = "'text', 'json_object', 'json_schema' or 'structural_tag'"
    raise _wrong(f"{param}.type", f"must be {kinds}")


def _structural_tag(value: Any, param: str) -> Constraint:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(_bounded(value, param))
        except (msgspec.DecodeError, RecursionError, ValueError):
            raise _wrong(param, "is not valid JSON") from None
    if not isinstance(value, dict):
        raise _wrong(param, "must be an object")
    _known(value, param, ("type", "structures", "triggers"))
    if value.get("type", "structural_tag") != "structural_tag":
        raise _wrong(f"{param}.type", "must be 'structural_tag'")
    text = tags_text(value, param, lambda schema, at: _json(schema, at).text)
    return Constraint("tags", _bounded(text, param), param)


def _json_schema(value: Mapping[str, Any], param: str) -> Constraint:
    """Read a schema with its name, in an object of its own or beside the type."""
    inner = value.get("json_schema")
    if inner is not None:
        _known(value, param, ("type", "json_schema"))
        param = f"{param}.json_schema"
        if not isinstance(inner, dict):
            raise _wrong(param, "must be an object")
        value = inner
    elif "schema" not in value:
        param = f"{param}.json_schema"
    _known(value, param, ("type", "name", "description", "schema", "strict"))
    for key, wanted in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(value.get(key), wanted | None):
            raise _wrong(f"{param}.{key}", f"must be {_NAMES[wanted]}")
    if value.get("schema") is None:
        raise _wrong(f"{param}.schema", "is required")
    return _json(value["schema"], f"{param}.schema", lenient=value.get("strict") is False)


_NAMES = {str: "a string", bool: "true or false"}


def _known(value: Mapping[str, Any], param: str, keys: tuple[str, ...]) -> None:
    for key, given in value.items():
        if key not in keys and given is not None:
            raise _wrong(f"{param}.{key[:64]}", "is not supported")


def _structured_outputs(value: Any, param: str) -> Constraint | None:
    given = {k: v for k, v in value.items() if v is not None and v is not False}
    for key in given:
        if key not in STRUCTURED:
            raise _wrong(f"{param}.{key[:64]}", "is not supported")
    _only_one(list(given), f"{param}.")
    for key, each in given.items():
        return STRUCTURED[key](each, f"{param}.{key}")
    raise _wrong(param, f"must have one of {', '.join(STRUCTURED)}")


Read = Callable[[Any, str], Constraint | None]

STRUCTURED: Mapping[str, Read] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
# request field -> how it is read; the names are OpenAI's, vLLM's, SGLang's and llama.cpp's
SOURCES: Mapping[str, Read] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_json_object": _json_object,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _json,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
}
