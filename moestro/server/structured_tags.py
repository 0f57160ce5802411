"""`structural_tag`: free text in which certain beginnings must go on as a schema says.

Owns: its fields and its grammar. The text is free until a trigger is written; then one of the
structures that begin with it follows, and the text is free again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from moestro.errors import InvalidRequest
from moestro.server.structured_lark import TEXT, Lark

SchemaText = Callable[[Any, str], str]  # a schema and the field it stands in, to checked text
MOST = 64  # structures, and triggers


def tags_text(value: Mapping[str, Any], param: str, schema_text: SchemaText) -> str:
    """Return the tags as JSON: lists of trigger, begin, schema and end. Raises `InvalidRequest`."""
    triggers = [
        _string(each, f"{param}.triggers.{number}")
        for number, each in enumerate(_list(value.get("triggers"), f"{param}.triggers"))
    ]
    tags = []
    for number, each in enumerate(_list(value.get("structures"), f"{param}.structures")):
        at = f"{param}.structures.{number}"
        if not isinstance(each, dict) or each.keys() != {"begin", "schema", "end"}:
            raise _wrong(at, "must be an object with 'begin', 'schema' and 'end', nothing else")
        begin = _string(each["begin"], f"{at}.begin")
        found = [trigger for trigger in triggers if begin.startswith(trigger)]
        if len(found) != 1:
            raise _wrong(f"{at}.begin", f"must start with one of the triggers, not {len(found)}")
        if not isinstance(each["end"], str):
            raise _wrong(f"{at}.end", "must be a string")
        tags.append([found[0], begin, schema_text(each["schema"], f"{at}.schema"), each["end"]])
    for number, trigger in enumerate(triggers):
        if not any(trigger == tag[0] for tag in tags):
            raise _wrong(f"{param}.triggers.{number}", "begins none of the structures")
    return json.dumps(tags)


def tags_rule(lark: Lark, text: str) -> str:
    """Return the name of a rule for what `tags_text` gave."""
    tags: list[list[str]] = json.loads(text)
    bodies = []
    for trigger in dict.fromkeys(tag[0] for tag in tags):
        rests = [
            " ".join(
                lark.marker(part) if kind == "text" else lark.json(part)
                for kind, part in (
                    ("text", begin.removeprefix(trigger)),
                    ("schema", schema),
                    ("text", end),
                )
                if part
            )
            for which, begin, schema, end in tags
            if which == trigger
        ]
        bodies.append(f"{lark.up_to(trigger)} {lark.any_of(rests)}")
    block = lark.rule(" | ".join(bodies))
    return lark.rule(f"{block}* {TEXT}")


def _list(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST:
        raise _wrong(param, f"must be an array with 1 to {MOST} entries")
    return value


def _string(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(param, "must be a string, and not empty")
    return value


def _wrong(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' {what}.", param=param)
