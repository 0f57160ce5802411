"""The checkpoint's chat template. Owns: running it, sandboxed and within a time limit.

Does not own: the shape of messages (`conversation`) or tokenizing what comes out.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moestro.errors import InvalidRequest, ModelError
from moestro.server.conversation import Message, in_texts, normalise, with_thinking

MAX_MESSAGE = 500  # characters of a template's own error
MAX_PROMPT = 64 * 1024 * 1024  # characters; a template that writes more is looping


class GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How a conversation is to end, and what else the template may look at."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] | None = None


class ChatTemplate:
    """One compiled template. `render` blocks: run it in the thread pool.

    A template that is broken is kept as such: the server can still complete plain prompts, and
    every chat request is told what is wrong.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, Any], *, seconds: float = 10.0
    ) -> None:
        self._special = dict(special_tokens)
        self._seconds = seconds
        self.source = source
        self.developer_role = "developer" in source
        self._thinking = "message.thinking" in source
        self.problem: str | None = None
        try:
            self._template = environment().from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            self.problem = f"{exc.message} (line {exc.lineno})"
        self._parts = self.problem is None and self._wants_parts()
        self._texts = self.problem is None and "arguments" in source and self._wants_texts()

    def render(self, messages: Sequence[Any], options: RenderOptions) -> str:
        """Return the prompt. Raises `InvalidRequest` with the template's own words."""
        if self.problem is not None:
            raise InvalidRequest(f"The chat template of this model is broken: {self.problem}.")
        if options.continue_final_message and options.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' needs 'add_generation_prompt' to be false.",
                param="continue_final_message",
            )
        listed = normalise(messages, developer_role=self.developer_role)
        if not options.continue_final_message:
            return self._run(listed, options)
        mark = f"<{secrets.token_hex(16)}>"
        text, found, _ = self._run(_marked(listed, mark), options).rpartition(mark)
        if not found:
            raise InvalidRequest(
                "The chat template does not show the end of the final message.",
                param="continue_final_message",
            )
        return text

    def _run(self, messages: list[Message], options: RenderOptions) -> str:
        shown = [_in_parts(m) for m in messages] if self._parts else messages
        shown = [in_texts(m) for m in shown] if self._texts else shown
        shown = [with_thinking(m) for m in shown] if self._thinking else shown
        variables = {
            **self._special,
            "tools": None,
            "documents": None,
            **(options.variables or {}),
            "messages": shown,
            "add_generation_prompt": options.add_generation_prompt,
        }
        try:
            return self._bounded(variables)
        except jinja2.TemplateError as exc:
            said = _short(exc.message or type(exc).__name__)
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as exc:
            said = type(exc).__name__  # its text may quote the messages
        except (RecursionError, MemoryError) as exc:
            said = f"too deep or too large ({type(exc).__name__})"
        raise InvalidRequest(f"The chat template refused: {said}", param="messages")

    def _bounded(self, variables: dict[str, Any]) -> str:
        """Render piece by piece, so that an endless loop that writes is ended."""
        deadline = time.monotonic() + self._seconds
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate({**variables, DEADLINE: deadline}):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_PROMPT or time.monotonic() > deadline:
                raise jinja2.TemplateError("it did not end in time")
        return "".join(pieces)

    def _wants_parts(self) -> bool:
        """Some templates only show content that is a list of parts: try which one shows up."""
        mark = secrets.token_hex(8)
        message: Message = {"role": "user", "content": mark}
        return not self._shows(message, mark) and self._shows(_in_parts(message), mark)

    def _wants_texts(self) -> bool:
        """Most templates write the object of a call's arguments; some want its JSON text."""
        mark = secrets.token_hex(8)
        function = {"name": "f", "arguments": {"p": mark}}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        message: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
        user: Message = {"role": "user", "content": "x"}
        shown = f'"{mark}"'  # a template without a filter shows Python's quotes
        return not self._shows(message, shown, user) and self._shows(in_texts(message), shown, user)

    def _shows(self, message: Message, mark: str, *before: Message) -> bool:
        variables = {
            **self._special,
            "messages": [*before, message],
            "add_generation_prompt": True,
        }
        try:
            return mark in self._bounded(variables)
        except Exception:
            return False


DEADLINE = "__moestro_deadline"  # name of the template variable that holds it


class TimedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that looks at the clock at every call, so loops that write nothing end too."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something from within a template."""
        deadline = __context.get(DEADLINE)
        if deadline is not None and time.monotonic() > deadline:
            raise jinja2.TemplateError("it did not end in time")
        return super().call(__context, __obj, *args, **kwargs)


def environment() -> TimedSandbox:
    """Return the environment that checkpoints' templates are written for."""
    env = TimedSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _strftime_now
    return env


def _raise(message: object) -> str:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _in_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _marked(messages: list[Message], mark: str) -> list[Message]:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": (last["content"] or "") + mark}]


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the source of a checkpoint's chat template: its own file first, then the config.

    A list of named templates gives the one called "default". Raises `ModelError` for a list
    without one.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return _pick(config.get("chat_template") or _legacy(folder))


def _legacy(folder: Path) -> Any:
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ModelError(f"chat_template.json is not valid JSON: {exc}") from exc
    return content.get("chat_template") if isinstance(content, dict) else None


def _pick(given: Any) -> str | None:
    if given is None or isinstance(given, str):
        return given
    named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
    if isinstance(named.get("default"), str):
        return str(named["default"])
    raise ModelError("chat_template is a list without a template named 'default'")
