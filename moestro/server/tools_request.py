"""What a request says about tools. Owns: checking `tools`.

Does not own: what the template does with them, or how calls are found in an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moestro.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
KINDS = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
MOST_TOOLS = 1024
DEEPEST = 64  # levels of a schema

Tool = dict[str, Any]


def checked_tools(given: Sequence[Any] | None) -> list[Tool]:
    """Return the tools as templates expect them, nulls left out. Raises `InvalidRequest`."""
    if not given:
        return []
    if len(given) > MOST_TOOLS:
        raise _wrong("tools", f"may hold {MOST_TOOLS} tools, not {len(given)}")
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(given)]
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            raise _wrong(f"tools.{i}.function.name", "must differ from the names before it")
        names.add(name)
    return tools


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the parameters' schema by function name."""
    return {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}


def strict_of(given: Sequence[Any] | None) -> frozenset[str]:
    """Return the names of the tools whose schema must hold. `given` was checked before."""
    functions = [tool["function"] for tool in given or ()]
    return frozenset(function["name"] for function in functions if function.get("strict"))


def _wrong(at: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"'{at}' {what}.", param=at)


def _tool(raw: Any, at: str) -> Tool:
    if not isinstance(raw, dict):
        raise _wrong(at, "must be an object")
    if raw.get("type") != "function":
        raise _wrong(f"{at}.type", "must be 'function'")
    if not isinstance(raw.get("function"), dict):
        raise _wrong(f"{at}.function", "must be an object")
    tool = {key: value for key, value in raw.items() if value is not None}
    tool["function"] = _function(raw["function"], f"{at}.function")
    return tool


def _function(raw: dict[str, Any], at: str) -> dict[str, Any]:
    function = {key: value for key, value in raw.items() if value is not None}
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{at}.name", "must be 1 to 128 letters, digits or any of _ . : / -")
    if not isinstance(function.get("description", ""), str):
        raise _wrong(f"{at}.description", "must be a string")
    if not isinstance(function.pop("strict", False), bool):
        raise _wrong(f"{at}.strict", "must be true or false")
    if "parameters" in function:
        _check_schema(function["parameters"], f"{at}.parameters")
    return function


def _check_schema(schema: Any, at: str) -> None:
    if not isinstance(schema, dict):
        raise _wrong(at, "must be a JSON schema object")
    if schema.get("type", "object") != "object":
        raise _wrong(at, "must be the schema of an object")
    _check_part(schema, at, 0)


def _check_part(schema: Any, at: str, depth: int) -> None:
    """Check the keywords that templates and parsers look at. `at` stays the parameters' path."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or depth > DEEPEST:
        raise _wrong(at, f"must be a JSON schema of at most {DEEPEST} levels")
    schema = {key: value for key, value in schema.items() if value is not None}
    kind = schema.get("type", [])
    kinds = kind if isinstance(kind, list) else [kind]
    if not all(isinstance(k, str) and k in KINDS for k in kinds):
        raise _wrong(at, f"has a type that is none of {', '.join(sorted(KINDS))}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _wrong(at, "has a 'required' that is no list of names")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise _wrong(at, "has 'properties' that are no object")
    inner = [*properties.values()]
    for key in ("anyOf", "oneOf", "allOf"):
        several = schema.get(key, [])
        if not isinstance(several, list):
            raise _wrong(at, f"has an '{key}' that is no array")
        inner += several
    if "items" in schema and not isinstance(schema["items"], list):
        inner.append(schema["items"])
    for part in inner:
        _check_part(part, at, depth + 1)
