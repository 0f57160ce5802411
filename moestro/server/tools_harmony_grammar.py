"""The grammar of harmony. Owns: answers as messages in channels, with calls and a last answer."""

from __future__ import annotations

from moestro.server.structured_lark import TEXT, Lark, quoted
from moestro.server.tools_harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from moestro.server.tools_rules import Calls


def harmony_grammar(lark: Lark, calls: Calls | None, answer: str | None) -> str:
    """Return what matches an answer: reasoning first, then a call or `answer`, a rule.

    Without `answer` and where no call is needed, any message may come beside calls.
    """
    channel, message = lark.marker(CHANNEL), lark.marker(MESSAGE)
    again = f'{lark.up_to(END)} {lark.marker(START)} "assistant"'
    thought = lark.rule(f'{channel} "analysis" {message} {again}')
    ends = [] if calls is None else _calls(lark, calls)
    if answer is not None and not (calls is not None and calls.needed):
        ends.append(f'{channel} "final" {message} {answer}')
    if answer is not None or (calls is not None and calls.needed):
        return f"{thought}* {lark.any_of(ends)}"
    spoken = lark.rule(f'{channel} ("analysis" | "commentary" | "final") {message}')
    return f"({spoken} {again})* {lark.any_of([*ends, f'{spoken} {TEXT}'])}"


def _calls(lark: Lark, calls: Calls) -> list[str]:
    """Return the ways to call. A model may name the recipient before the channel, if free to."""
    channel, message = lark.marker(CHANNEL), lark.marker(MESSAGE)
    found = []
    for tool in calls.tools:
        body = f'{lark.marker(CONSTRAIN)} "json" {message} {lark.json(tool.schema)}'
        recipient = f"to=functions.{tool.name}"
        found.append(f"{channel} {quoted(f'commentary {recipient} ')} {body}")
        if not calls.needed:
            found.append(f'{quoted(" " + recipient)} {channel} "commentary " {body}')
    return found
