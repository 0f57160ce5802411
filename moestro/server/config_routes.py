"""/v1/config. Owns: how settings look on the wire. What can change is `live_config`'s."""

from __future__ import annotations

import typing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moestro.config import Config
from moestro.errors import InvalidRequest
from moestro.server.edge import KEY, REQUEST_ID
from moestro.server.live_config import LIVE, LiveConfig
from moestro.server.service import Service, body_of
from moestro.server.wire import reply


async def show_config(_request: Request, service: Service) -> Response:
    """Show every setting as it holds, but for secrets, and which of them can change."""
    return reply(_json(service.live))


async def change_config(request: Request, service: Service) -> Response:
    """Change settings that can change, all that are named or none of them."""
    # Other types are what a page of another site may send without asking the browser's user.
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise InvalidRequest("The content-type header must be application/json.")
    body = await body_of(request)
    key = request.scope.get(KEY)
    who = key.name if key is not None and key.name else "a client without a name"
    await service.live.change(body, who, request.scope.get(REQUEST_ID))
    return reply(_json(service.live))


def _json(live: LiveConfig) -> dict[str, Any]:
    return {
        "object": "config",
        "values": live.values(),
        "live": {name: _limits(name, live) for name in LIVE},
    }


def _limits(name: str, live: LiveConfig) -> dict[str, Any]:
    """What a new value may be."""
    field = Config.model_fields[name]
    if typing.get_origin(field.annotation) is typing.Literal:
        return {"choices": list(typing.get_args(field.annotation))}
    most = live.most(name)
    return {"type": "boolean"} if field.annotation is bool else {"type": "number", "maximum": most}


# method, path, handler
ROUTES = (("GET", "/v1/config", show_config), ("POST", "/v1/config", change_config))
