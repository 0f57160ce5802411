"""Errors on the wire. Owns: the one mapping from the error tree to a reply or a stream event."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from moestro.errors import (
    BadKey,
    BodyTimeout,
    BodyTooLarge,
    MoestroError,
    NotFound,
    RateLimited,
    Unavailable,
)
from moestro.server import messages_problems
from moestro.server.messages_problems import speaks_messages
from moestro.server.wire import dump, reply

KINDS = {404: "not_found_error"}


class UnknownModel(NotFound):
    """The model named is not served. Typed as OpenAI types it."""

    kind = "invalid_request_error"
    code = "model_not_found"


def body_of(error: MoestroError) -> dict[str, Any]:
    """Return the nested error object that every typed client understands."""
    return _body(error.message, error.kind, error.param, error.code)


def response_of(error: MoestroError, scope: Scope | None = None) -> Response:
    """Return the reply for an error that comes before anything was streamed.

    `scope`: the request's, since the Messages API spells errors its own way.
    """
    body = body_of(error)
    if scope is not None and speaks_messages(scope):
        body = messages_problems.body_of(error.message, error.status)
    return reply(body, error.status, _headers(error))


def event_of(error: MoestroError) -> str:
    """Return the stream event for an error that comes after the status line."""
    body = _body(error.message, error.kind, error.param, error.code or error.status)
    return f"data: {dump(body)}\n\n"


def response_of_http(exc: HTTPException, scope: Scope | None = None) -> Response:
    """Return the reply for what the router refuses: unknown paths and wrong methods."""
    kind = KINDS.get(exc.status_code, "invalid_request_error")
    message = {404: "No such route.", 405: "This route does not take that method."}
    text = message.get(exc.status_code, str(exc.detail))
    headers = dict(exc.headers) if exc.headers else None
    body = _body(text, kind, None, None)
    if scope is not None and speaks_messages(scope):
        body = messages_problems.body_of(text, exc.status_code)
    return reply(body, exc.status_code, headers)


async def handle(request: Request, exc: Exception) -> Response:
    """Answer an exception that reached the router. Registered for the two kinds it knows."""
    if isinstance(exc, MoestroError):
        return response_of(exc, request.scope)
    assert isinstance(exc, HTTPException)
    return response_of_http(exc, request.scope)


def _body(message: str, kind: str, param: str | None, code: str | int | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _headers(error: MoestroError) -> dict[str, str]:
    if isinstance(error, Unavailable | RateLimited):
        return {"retry-after": str(error.retry_after)}
    if isinstance(error, BadKey):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, BodyTooLarge | BodyTimeout):
        # The rest of the body is not read, so this connection cannot carry another request.
        return {"connection": "close"}
    if error.status in (500, 504):
        # Clients repeat 5xx by themselves; a prompt that broke a step would break it again, and
        # one that took too long would only make the others wait.
        return {"x-should-retry": "false"}
    return {}
