"""Grammars of calls. Owns: for each family, what makes exactly the calls that its parser reads.

A family writes its calls in blocks; each block begins with an opening marker. The spelling within
the family is the one of the chat template, because that is what the model was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moestro.server import tools_families as families
from moestro.server.structured_lark import TEXT, Lark, quoted
from moestro.server.tools_rules import Calls, ToolRule
from moestro.server.tools_xml import FUNCTION
from moestro.server.tools_xml_grammar import Parameters


@dataclass(frozen=True, slots=True)
class Opening:
    """A marker and what follows it: a call, or several of them."""

    marker: str
    rest: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a family writes calls. The first opening is its own, others are read as well."""

    openings: tuple[Opening, ...]
    between: str = ""  # what stands between two blocks
    several: bool = True  # an answer may have more than one block


def blocks_of(lark: Lark, calls: Calls) -> Blocks:
    """Return the blocks of a family. Raises `InvalidRequest` for a tool that it cannot write."""
    return FAMILIES[calls.family](lark, calls)


def needed(lark: Lark, calls: Calls) -> str:
    """Return what matches one call or more, and nothing else."""
    blocks = blocks_of(lark, calls)
    opening = blocks.openings[0]
    block = lark.rule(f"{lark.marker(opening.marker)} {opening.rest}")
    if calls.one or not blocks.several:
        return block
    return f"{block} ({blocks.between} {block})*"


def within_text(lark: Lark, calls: Calls) -> str:
    """Return what matches text in which every call is one of the tools'."""
    blocks = blocks_of(lark, calls)
    each = [f"{lark.up_to(opening.marker)} {opening.rest}" for opening in blocks.openings]
    block = lark.rule(" | ".join(each))
    return f"({TEXT} | {block})" if calls.one else f"{block}* {TEXT}"


def json_call(lark: Lark, tool: ToolRule) -> str:
    """Return what matches a call as an object with name and arguments."""
    head = quoted(f'{{"name": {quoted(tool.name)}, "arguments": ')
    return f'{head} {lark.json(tool.schema)} "}}"'


def _hermes(lark: Lark, calls: Calls) -> Blocks:
    body = lark.any_of(json_call(lark, tool) for tool in calls.tools)
    rest = f'"\\n" {body} "\\n" {lark.marker(families.TOOL_CALL_END)}'
    return Blocks((Opening(families.TOOL_CALL, rest),), between='"\\n"')


def _qwen3_coder(lark: Lark, calls: Calls) -> Blocks:
    body = lark.rule(" | ".join(Parameters(lark, tool).function() for tool in calls.tools))
    rest = f'{quoted(chr(10) + FUNCTION)} {body} "\\n" {lark.marker(families.TOOL_CALL_END)}'
    return Blocks((Opening(families.TOOL_CALL, rest), Opening(FUNCTION, body)), between='"\\n"')


def _mistral(lark: Lark, calls: Calls) -> Blocks:
    if calls.listed:
        call = lark.rule(" | ".join(json_call(lark, tool) for tool in calls.tools))
        more = "" if calls.one else f'(", " {call})*'
        opening = Opening(families.TOOL_CALLS, f'/ ?\\[/ {call} {more} "]"')
        return Blocks((opening,), several=False)
    args = lark.marker(families.ARGS)
    body = lark.any_of(f"{quoted(t.name)} {args} {lark.json(t.schema)}" for t in calls.tools)
    return Blocks((Opening(families.TOOL_CALLS, body),))


def _deepseek(lark: Lark, calls: Calls) -> Blocks:
    sep, end = lark.marker(families.SEP), lark.marker(families.CALL_END)
    bodies = []
    for tool in calls.tools:
        arguments = lark.json(tool.schema)
        if calls.fenced:
            fence = quoted(f"{tool.name}\n{families.FENCE}\n")
            bodies.append(f'"function" {sep} {fence} {arguments} "\\n{families.FENCE_END}" {end}')
        else:
            bodies.append(f"{quoted(tool.name)} {sep} {arguments} {end}")
    body = lark.rule(" | ".join(bodies))
    begin = lark.marker(families.CALL_BEGIN)
    more = "" if calls.one else f'("\\n"? {begin} {body})*'
    block = f"{begin} {body} {more} {lark.marker(families.CALLS_END)}"
    own = Opening(families.CALLS_BEGIN, block)
    return Blocks((own, Opening(families.CALL_BEGIN, body)), several=False)


FAMILIES: Mapping[str, Callable[[Lark, Calls], Blocks]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "mistral": _mistral,
    "deepseek": _deepseek,
}
