"""Which calls an answer may have. Owns: `tool_choice`, and the rules that follow from it.

Does not own: how rules become a grammar (`tools_grammar`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moestro.errors import InvalidRequest
from moestro.server.structured import schema_text
from moestro.server.tools_families import ARGS, FENCE
from moestro.server.tools_request import Tool

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Choice:
    """What `tool_choice` says. `names`: the tools that may be called, None for all of them."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    named: bool = False  # exactly this one function


@dataclass(frozen=True, slots=True)
class ToolRule:
    """A tool that may be called. `schema`: its parameters as `schema_text` writes them."""

    name: str
    schema: str
    strict: bool
    param: str


@dataclass(frozen=True, slots=True)
class Calls:
    """Which calls an answer has. `needed`: at least one and no text; `one`: not more than one.

    `fenced` and `listed` say how the template spells calls, where the family has two ways.
    """

    family: str
    tools: tuple[ToolRule, ...]
    needed: bool
    one: bool
    fenced: bool = False
    listed: bool = False


def choice_of(given: Any, tools: Sequence[Tool]) -> Choice:
    """Return what a `tool_choice` says. Raises `InvalidRequest`."""
    if given is None or given == "auto":
        return Choice("auto" if tools else "none")
    if given == "none":
        return Choice("none")
    kind = given.get("type") if isinstance(given, dict) else None
    if given == "required" or kind in ("function", "allowed_tools"):
        if not tools:
            raise _wrong("tool_choice", "needs 'tools' to choose from")
        if kind == "function":
            return Choice("required", (_name(given, "tool_choice", tools),), named=True)
        return _allowed(given, tools) if kind == "allowed_tools" else Choice("required")
    raise _wrong("tool_choice", "must be 'none', 'auto', 'required', a function or allowed_tools")


def _allowed(given: dict[str, Any], tools: Sequence[Tool]) -> Choice:
    at = "tool_choice.allowed_tools"
    inner = given.get("allowed_tools")
    if not isinstance(inner, dict):
        raise _wrong(at, "must be an object")
    mode, listed = inner.get("mode"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise _wrong(f"{at}.mode", "must be 'auto' or 'required'")
    if not isinstance(listed, list) or not listed:
        raise _wrong(f"{at}.tools", "must be an array of at least one tool")
    names = tuple(_name(each, f"{at}.tools.{i}", tools) for i, each in enumerate(listed))
    return Choice(mode, tuple(dict.fromkeys(names)))


def _name(given: Any, at: str, tools: Sequence[Tool]) -> str:
    """Return the name in `{"type": "function", "function": {"name": ..}}`."""
    if not isinstance(given, dict) or given.get("type") != "function":
        raise _wrong(f"{at}.type", "must be 'function'")
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong(f"{at}.function.name", "must be a string")
    if name not in (tool["function"]["name"] for tool in tools):
        raise _wrong(f"{at}.function.name", "is the name of none of the tools")
    return name


def calls_of(
    choice: Choice,
    tools: Sequence[Tool],
    *,
    strict: frozenset[str],
    parallel: bool,
    family: str,
    template: str,
) -> Calls | None:
    """Return the rules that a grammar must hold calls to; None where calls are free or absent.

    `strict`: names of the tools whose schema holds in any case.
    """
    if choice.mode == "none":
        return None
    if choice.mode == "auto" and choice.names is None and not strict:
        return None
    rules = [
        _rule(tool, f"tools.{i}.function.parameters", tool["function"]["name"] in strict)
        for i, tool in enumerate(tools)
        if choice.names is None or tool["function"]["name"] in choice.names
    ]
    return Calls(
        family=family,
        tools=tuple(rules),
        needed=choice.mode == "required",
        one=choice.named or not parallel,
        fenced=FENCE in template,
        listed=ARGS not in template,
    )


def _rule(tool: Tool, param: str, strict: bool) -> ToolRule:
    function = tool["function"]
    schema = function.get("parameters")
    schema = NO_PARAMETERS if schema is None else {"type": "object", **schema}
    text = schema_text(schema, param, lenient=not strict)
    return ToolRule(function["name"], text, strict, param)


def _wrong(at: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"'{at}' {what}.", param=at)
