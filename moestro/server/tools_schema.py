"""What the schema of a tool's parameters says about one value. Owns: its kinds.

A value that is written without quotes is what its schema says, so readers and grammars ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRING, NULL, BOOLEAN = "string", "null", "boolean"
DEEPEST = 16  # references and alternatives followed
KINDS = {str: STRING, bool: BOOLEAN, int: "integer", float: "number", dict: "object", list: "array"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a local `$ref` leads to; `schema` itself where there is none."""
    for _ in range(DEEPEST):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str) or not ref.startswith("#/"):
            return schema
        found: Any = root
        for key in ref[2:].split("/"):
            found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            return schema
        schema = found
    return schema


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows by name; empty where it says nothing."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > DEEPEST:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(KINDS.get(type(value), NULL) for value in values)
    found: frozenset[str] = frozenset()
    for key in ("anyOf", "oneOf", "allOf"):
        several = schema.get(key)
        for each in several if isinstance(several, list) else ():
            found |= kinds_of(each, root, depth + 1)
    return found
