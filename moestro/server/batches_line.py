"""One request of a batch, answered as if a client had sent it. Owns: the way into the routes'
handlers without HTTP, what a batch's request may not ask for, and the record of the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from moestro.errors import InvalidRequest, MoestroError, Unavailable
from moestro.log import about
from moestro.server.background import BACKGROUND
from moestro.server.edge import REQUEST_ID
from moestro.server.problems import response_of, response_of_http
from moestro.server.service import Service
from moestro.server.wire import dump

log = logging.getLogger(__name__)

Handler = Callable[[Request, Service], Awaitable[Response]]
AGAIN = 0.5  # seconds until a request that the server cannot take now is tried again
REFUSED = {
    "stream": ((False, None), "an answer in a batch is always whole"),
    "stream_options": ((None,), "an answer in a batch is always whole"),
    "priority": ((None, 0), "all of a batch runs behind other requests"),
}


async def answer_line(
    service: Service, handler: Handler, path: str, custom_id: str, body: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """The record of one answer, and whether it is a good one.

    Waits as long as the server cannot take it: while it loads, drains or restarts its engine.
    """
    request_id = f"req-{secrets.token_hex(12)}"
    while True:
        try:
            _check(body)
            response = await handler(_request(path, body, request_id), service)
        except Unavailable:
            await asyncio.sleep(AGAIN)
            continue
        except MoestroError as error:
            response = response_of(error)
        except HTTPException as error:
            response = response_of_http(error)
        except Exception as error:
            # The text of the exception may hold what the user wrote: log where, not what.
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error(
                "unexpected %s in a batch", type(error).__name__, extra=about(request_id, trace)
            )
            response = response_of(MoestroError("Internal error."))
        return _record(custom_id, request_id, response), response.status_code == 200


def undone(custom_id: str, outcome: str) -> dict[str, Any]:
    """The record of a request that did not run before the batch `outcome` (expired, cancelled)."""
    why = {
        "expired": "The request did not run within the completion window.",
        "cancelled": "The batch was cancelled before the request ran.",
    }
    error = {"code": f"batch_{outcome}", "message": why[outcome]}
    return {"id": _id(), "custom_id": custom_id, "response": None, "error": error}


def _record(custom_id: str, request_id: str, response: Response) -> dict[str, Any]:
    answer = {
        "status_code": response.status_code,
        "request_id": request_id,
        "body": json.loads(bytes(response.body)),
    }
    return {"id": _id(), "custom_id": custom_id, "response": answer, "error": None}


def _id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def _check(body: dict[str, Any]) -> None:
    for name, (harmless, reason) in REFUSED.items():
        value = body.get(name)
        if not any(value is h or (type(value) is type(h) and value == h) for h in harmless):
            raise InvalidRequest(f"'{name}' is not possible here: {reason}.", param=name)


def _request(path: str, body: dict[str, Any], request_id: str) -> Request:
    """A request as the routes know it, from nobody who could leave."""
    content = dump(body).encode("ascii")
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        REQUEST_ID: request_id,
        BACKGROUND: True,
    }
    return Request(scope, receive)
