"""The routes that only look: models, health, version, metrics, statistics. All are O(1)."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import moestro
from moestro.errors import NotFound
from moestro.server import messages_models
from moestro.server.messages_problems import speaks_messages
from moestro.server.prometheus import CONTENT_TYPE
from moestro.server.service import Service
from moestro.server.wire import reply

FRESH = 0.02  # seconds a scrape waits for new numbers; a busy engine has just sent some anyway
VERSION: str = getattr(moestro, "__version__", "0.0.0")


def model_object(service: Service, name: str) -> dict[str, Any]:
    """Return one entry of the model list. `created` is the server's start, not the call's."""
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "moestro",
        "root": service.settings.model_path or name,
        "parent": None,
        "max_model_len": None if info is None else info.max_model_len,
        "permission": [],
    }


async def models(request: Request, service: Service) -> Response:
    """List the served names."""
    if speaks_messages(request.scope):
        return reply(messages_models.page(service, request.query_params))
    data = [model_object(service, name) for name in service.settings.served_model_names]
    return reply({"object": "list", "data": data})


async def model(request: Request, service: Service) -> Response:
    """Show one served name."""
    id: str = request.path_params["id"]
    if not id:
        raise NotFound("No such route.")
    name = service.model_name(id)
    if speaks_messages(request.scope):
        return reply(messages_models.entry(service, name))
    return reply(model_object(service, name))


async def health(_request: Request, service: Service) -> Response:
    """Say whether the server can answer: 200, or 503 with the reason and how far loading is.

    `error` is what ended the engine before, `stalled` whether the new one says nothing.
    """
    verdict = service.lifecycle.verdict()
    if verdict == "ok":
        return reply({"status": "ok"})
    body: dict[str, Any] = {"status": verdict}
    if verdict in ("loading", "restarting"):
        stage, done, total = service.engine.progress
        progress = round(done / total, 4) if total else 0.0
        body |= {"stage": stage, "done": done, "total": total, "progress": progress}
        body |= {"stalled": service.engine.stalled, "error": service.engine.error}
    return reply(body, 503, {"retry-after": "1"})


async def version(_request: Request, _service: Service) -> Response:
    """Say which release this is."""
    return reply({"version": VERSION})


async def root(_request: Request, service: Service) -> Response:
    """Greet whoever opens the address."""
    names = service.settings.served_model_names
    return reply({"name": "moestro", "version": VERSION, "models": list(names)})


async def metrics(_request: Request, service: Service) -> Response:
    """Show everything for Prometheus."""
    await service.engine.stats(FRESH)
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


async def stats(_request: Request, service: Service) -> Response:
    """Show the engine's statistics as JSON, per layer and per tier."""
    engine = service.engine
    fresh = await engine.stats(1.0)
    body = {
        "state": engine.state,
        "error": engine.error,
        "stalled": engine.stalled,
        "restarts": engine.restarts,
        "draining": service.lifecycle.draining,
        "live_calls": service.lifecycle.live - 1,  # besides this one
        "info": engine.info,
        "stats": fresh,
    }
    return Response(msgspec.json.encode(body), media_type="application/json")
