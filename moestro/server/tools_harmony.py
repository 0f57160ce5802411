"""Harmony, the format of GPT-OSS. Owns: channels told apart into reasoning, text and calls.

An answer is a row of messages, `<|channel|>NAME to=RECIPIENT<|message|>BODY<|end|>`, with
`<|start|>assistant` between them; the prompt has the first one. The analysis channel is reasoning,
a recipient `functions.f` makes a call, and all else is for the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from moestro.server.tools_deltas import Broken, Cut, Sink, call_of
from moestro.server.tools_json import copied, object_comes
from moestro.server.tools_reader import Found, Reader, Script, Steps, prose, until

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
LONGEST_HEADER = 256
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
IN_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
EARLY = " to="  # a recipient may stand before the first channel


def harmony(*, thoughts: bool, calls: bool) -> Script:
    """Return the script. Without `thoughts` reasoning is text too, without `calls` calls are."""

    def script(r: Reader, out: Sink) -> Steps[None]:
        found: Found | None = None
        head = (yield from _header(r, early=True)) if (yield from _early(r)) else ""
        while True:
            recipient = RECIPIENT.search(head)
            if recipient is not None and calls:
                found = yield from _call(r, out, recipient[1])
            else:
                channel = IN_CHANNEL.search(head)
                hidden = thoughts and channel is not None and channel[1] == "analysis"
                emit = out.thought if hidden else out.said
                found = yield from _text(r, emit)
            if found is None:
                return
            head = found.word + (yield from _header(r)) if found.word in (START, CHANNEL) else ""

    return script


def _early(r: Reader) -> Steps[bool]:
    """Whether the answer begins with a recipient."""
    while len(r.text) < len(EARLY) and EARLY.startswith(r.text):
        if r.ended:
            return False
        yield
    return r.text.startswith(EARLY)


def _header(r: Reader, *, early: bool = False) -> Steps[str]:
    """Return what stands before the body; nothing when no body comes: then that is the body.

    A header that the end cut off is dropped, unless it is `early` and may be text after all.
    """
    start = r.pos
    try:
        return (yield from until(r, MESSAGE, LONGEST_HEADER))
    except Cut:
        r.pos = start if early else len(r.text)
    except Broken:
        r.pos = start
    return ""


def _text(r: Reader, emit: Callable[[str], None]) -> Steps[Found | None]:
    found = yield from prose(r, emit, MARKERS, "")
    if found is None:
        emit(r.rest())
    return found


def _call(r: Reader, out: Sink, name: str) -> Steps[Found | None]:
    """Tell the call whose body comes, up to the marker that ends it; a body of no JSON is text."""
    start = r.pos
    try:
        written = yield from object_comes(r)
    except (Broken, Cut):
        written = False
    if not written:
        r.pos = start
        return (yield from _odd_call(r, out, name))
    out.begin(name)
    behind: list[str] = []
    whole = yield from copied(r, out.more, [])
    found = yield from _text(r, behind.append if whole else out.more)
    if whole or found is not None:
        out.end()
    if (text := "".join(behind)).strip():
        out.said(text)
    return found


def _odd_call(r: Reader, out: Sink, name: str) -> Steps[Found | None]:
    body: list[str] = []
    found = yield from _text(r, body.append)
    text = "".join(body)
    try:
        out.call(call_of(name, text))
    except Broken:
        out.said(text)
    return found
