"""Errors as the Messages API spells them. Owns: its error object, its types, and where it is used.

Does not own: statuses and headers, which are the same on every route (`problems`).
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from moestro.errors import MoestroError
from moestro.server.wire import event

ROUTE, MODELS = "/v1/messages", "/v1/models"
VERSION = b"anthropic-version"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_messages(scope: Scope) -> bool:
    """Whether a request is answered as the Messages API does, unknown routes too.

    The list of models is on a path that both APIs have: Anthropic's clients send their version.
    """
    path = scope["path"]
    if path == ROUTE or path.startswith(ROUTE + "/"):
        return True
    shared = path == MODELS or path.startswith(MODELS + "/")
    return shared and any(name == VERSION for name, _ in scope["headers"])


def body_of(message: str, status: int) -> dict[str, Any]:
    """Return the error object."""
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def event_of(error: MoestroError) -> str:
    """Return the stream event for an error that comes after the status line."""
    return event(body_of(error.message, error.status))
