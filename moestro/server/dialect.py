"""Requests in another API's words. Owns: what Responses and Messages share in becoming a chat.

Both are made into the body of a chat request, which then takes chat's own way: whatever that
refuses is refused here too, under the name that the caller used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from moestro.errors import ContextTooLong, InvalidRequest, MoestroError
from moestro.server.call import Call
from moestro.server.refusals import Refused, UnknownKeys, check_extra
from moestro.server.schema import ChatRequest

Fields = dict[str, Any]

# Chat's fields beyond OpenAI's that every generating route takes.
EXTENSIONS = frozenset(
    {
        *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output"),
        *("min_tokens", "ignore_eos", "skip_special_tokens", "add_special_tokens"),
        *("chat_template_kwargs", "priority", "cache_salt", "request_id"),
    }
)
MESSAGE = re.compile(r"messages\.(\d+)")


def wrong(at: str, what: str) -> InvalidRequest:
    """Return the error for a field that is not as it must be."""
    return InvalidRequest(f"'{at}' {what}.", param=at)


def fields_of(value: Any, at: str) -> Fields:
    """Return an object without its nulls. Raises `InvalidRequest` for anything else."""
    if not isinstance(value, dict):
        raise wrong(at, "must be an object")
    return {key: found for key, found in value.items() if found is not None}


def string_of(found: Fields, name: str, at: str) -> str:
    """Return a string that must be there."""
    value = found.get(name)
    if not isinstance(value, str):
        raise wrong(f"{at}.{name}", "is required" if value is None else "must be a string")
    return value


def one_of(value: Any, at: str, known: Sequence[str]) -> str:
    """Return a string that must be one of the known ones."""
    if not isinstance(value, str) or value not in known:
        raise wrong(at, f"must be one of {', '.join(known)}")
    return value


def refuse(found: Fields, at: str, refused: Refused) -> None:
    """Raise `InvalidRequest` for a nested field that asks for what is not served."""
    for name in refused.keys() & found.keys():
        harmless, reason = refused[name]
        if not any(type(found[name]) is type(h) and found[name] == h for h in harmless):
            raise wrong(f"{at}.{name}", f"is not supported: {reason}")


def passed_on(extra: Fields, refused: Refused, unknown: UnknownKeys, route: str) -> Fields:
    """Return the extensions among the fields that a route does not know by itself.

    Raises `InvalidRequest` for what is refused, and for chat's fields that mean nothing here.
    """
    check_extra(extra, refused, unknown)
    found = {key: value for key, value in extra.items() if value is not None}
    for key in found:
        if key in ChatRequest.model_fields and key not in EXTENSIONS:
            raise wrong(key, f"is not a field of {route}")
    return {key: value for key, value in found.items() if key in EXTENSIONS}


@dataclass(frozen=True, slots=True)
class Names:
    """What chat's fields are called by the caller.

    `origins`: where each chat message came from. `fields`: (pattern, replacement), the first that
    matches at the start of a name counts. `too_long`: what is said first of a prompt that does not
    fit, since clients look for certain words.
    """

    origins: Sequence[str]
    fields: Sequence[tuple[str, str]]
    too_long: str = ""

    def of(self, name: str) -> str:
        """Return the caller's name."""
        message = MESSAGE.match(name)
        if message is not None and int(message[1]) < len(self.origins):
            return self.origins[int(message[1])] + name[message.end() :]
        for pattern, replacement in self.fields:
            renamed, count = re.subn(rf"^{pattern}(?!\w)", replacement, name)
            if count:
                return renamed
        return name

    def rename(self, error: MoestroError) -> None:
        """Put the caller's names into an error, in its text where they stand in quotes."""
        error.message = re.sub(r"'([\w.]+)'", lambda m: f"'{self.of(m[1])}'", error.message)
        if isinstance(error, ContextTooLong):
            error.message = self.too_long + error.message
        error.param = None if error.param is None else self.of(error.param)

    def call(self, call: Call) -> Call:
        """Return the call whose own errors, later, speak of the caller's fields."""
        if call.output.bound_by is None:
            return call
        return replace(call, output=replace(call.output, bound_by=self.of(call.output.bound_by)))


@contextmanager
def called(names: Names) -> Iterator[None]:
    """While inside, errors speak of the caller's fields."""
    try:
        yield
    except MoestroError as error:
        names.rename(error)
        raise
