"""The grammar of Qwen3-Coder's calls. Owns: a tool's schema as parameters between tags.

A value that may be a string is written without quotes, so JSON grammars do not help: what a schema
says about strings is spelled here, and what cannot be spelled is refused for a strict tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import regex_to_lark

from moestro.errors import InvalidRequest
from moestro.server.structured_lark import TEXT, Lark, quoted
from moestro.server.tools_families import LONGEST_NAME
from moestro.server.tools_rules import ToolRule
from moestro.server.tools_schema import DEEPEST, NULL, STRING, kinds_of, resolved
from moestro.server.tools_xml import FUNCTION_END, PARAMETER, PARAMETER_END

NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
OF_ROOT = NOTES | {
    *("type", "properties", "required", "additionalProperties"),
    *("$defs", "definitions", "$schema", "$id", "x-guidance"),
}
OF_STRING = NOTES | {
    *("type", "enum", "const", "minLength", "maxLength", "pattern", "anyOf", "oneOf", "$ref"),
}
FREE_NAME = r"/<parameter=[A-Za-z0-9_\-]{1,64}>\n/"


class Parameters:
    """Writes the parameters of one tool."""

    def __init__(self, lark: Lark, tool: ToolRule) -> None:
        self._lark = lark
        self._tool = tool
        self._root: dict[str, Any] = json.loads(tool.schema)

    def function(self) -> str:
        """Return what matches a call from the name on to the end of the function."""
        self._check(self._root, OF_ROOT)
        properties = self._root.get("properties") or {}
        required = self._root.get("required") or []
        wanted = {**properties, **{name: {} for name in required if name not in properties}}
        parts = [self._part(n, s, needed=n in required) for n, s in wanted.items()]
        if not wanted and self._root.get("additionalProperties") is not False:
            free = self._lark.rule(f"{FREE_NAME} {self._text()}")
            parts = [f"{free}*"]
        return " ".join([quoted(f"{self._tool.name}>\n"), *parts, quoted(FUNCTION_END)])

    def _part(self, name: str, schema: Any, *, needed: bool) -> str:
        if not name.strip() or name != name.strip() or ">" in name or len(name) > LONGEST_NAME:
            raise self._refused("has a parameter whose name calls of this model cannot write")
        value = self._value(schema)
        rule = self._lark.rule(f"{quoted(f'{PARAMETER}{name}>{chr(10)}')} {value}")
        return rule if needed else f"{rule}?"

    def _value(self, schema: Any) -> str:
        """Return what matches a value and the tag that ends it."""
        kinds = kinds_of(schema, self._root)
        if not kinds:
            self._check(schema, NOTES)
            return self._text()
        if STRING in kinds:
            bodies = [*self._strings(schema)]
            if NULL in kinds:
                bodies.append(_ended("null"))
            return self._lark.any_of(bodies)
        named = {k: self._root[k] for k in ("$defs", "definitions") if k in self._root}
        whole = {**named, **schema, "x-guidance": self._root.get("x-guidance", {})}
        return f"{self._lark.json(json.dumps(whole))} {quoted(chr(10) + PARAMETER_END + chr(10))}"

    def _strings(self, schema: Any, depth: int = 0) -> Iterator[str]:
        """Yield what matches the strings that a schema allows."""
        schema = resolved(schema, self._root)
        if depth > DEEPEST:
            raise self._refused("refers to itself for the value of a string")
        self._check(schema, OF_STRING)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        several = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(values, list):
            yield from (_ended(self._plain(each)) for each in values if isinstance(each, str))
        elif several and "type" not in schema:
            for each in several:
                if STRING in kinds_of(each, self._root):
                    yield from self._strings(each, depth + 1)
        else:
            yield self._limited(schema)

    def _plain(self, text: str) -> str:
        if PARAMETER_END in text:
            raise self._refused(f"has a value with {PARAMETER_END}")
        return text

    def _limited(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength"), schema.get("maxLength")
        limits = []
        if least is not None or most is not None:
            limits.append(f"/(?s:.{{{self._length(least, '0')},{self._length(most, '')}}})/")
        if "pattern" in schema and (pattern := self._pattern(schema["pattern"])):
            limits.append(pattern)
        if not limits:
            return self._text()
        limits.append(r"~/(?s:.*)<\/parameter>(?s:.*)/")
        value = self._lark.terminal(" & ".join(limits))
        end = self._lark.rule(f"{value} {quoted(chr(10) + PARAMETER_END)}", options="lazy")
        return f'{end} "\\n"'

    def _length(self, value: Any, absent: str) -> str:
        if value is None:
            return absent
        if type(value) is not int or value < 0:
            raise self._refused("has a length that is no number of characters")
        return str(value)

    def _pattern(self, pattern: Any) -> str:
        """Return what matches a text that the pattern is found in; nothing when it is too odd."""
        if not isinstance(pattern, str):
            raise self._refused("has a pattern that is no string")
        inner = pattern.removeprefix("^").removesuffix("$")
        if inner != pattern and ("|" in inner or inner.endswith("\\")):
            if self._tool.strict:
                raise self._refused("has a pattern with anchors and alternatives")
            return ""
        before = "" if pattern.startswith("^") else "(?s:.*)"
        behind = "" if pattern.endswith("$") else "(?s:.*)"
        return f"/{before}(?:{regex_to_lark(inner, 'dw')}){behind}/"

    def _text(self) -> str:
        end = self._lark.rule(f"{TEXT} {quoted(PARAMETER_END)}", options="lazy")
        return f'{end} "\\n"'

    def _check(self, schema: Any, known: frozenset[str]) -> None:
        if not self._tool.strict or not isinstance(schema, dict):
            return
        for key in schema:
            if key not in known:
                raise self._refused(
                    f"has '{key[:64]}', which the calls of this model cannot be held to"
                )

    def _refused(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"'{self._tool.param}' {what}.", param=self._tool.param)


def _ended(text: str) -> str:
    return quoted(f"{text}\n{PARAMETER_END}\n")
