"""The FastAPI app. Owns: which route goes where and what is wrapped around all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from moestro.errors import MoestroError
from moestro.server import pages, problems, tokens
from moestro.server.chat import prepare_chat
from moestro.server.chat_wire import ChatWire
from moestro.server.completion_wire import CompletionWire
from moestro.server.completions import prepare_completion
from moestro.server.edge import BodyLimit, Edge, KeyCheck, RateLimit
from moestro.server.engine_port import Engine
from moestro.server.keys import KeyRing
from moestro.server.lifecycle import Lifecycle
from moestro.server.prometheus import Metrics
from moestro.server.rate_limit import RateLimiter
from moestro.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Wire,
)
from moestro.server.service import Service, answer
from moestro.server.settings import ServerSettings
from moestro.server.text import Text

Handler = Callable[[Request, Service], Awaitable[Response]]


async def chat(request: Request, service: Service) -> Response:
    """Continue a conversation."""
    return await answer(request, service, prepare_chat, ChatWire)


async def completions(request: Request, service: Service) -> Response:
    """Continue one or more prompts."""
    return await answer(request, service, prepare_completion, CompletionWire)


# path -> (handler, methods, body model for the documentation)
ROUTES: dict[str, tuple[Handler, tuple[str, ...], type[Wire] | None]] = {
    "/v1/chat/completions": (chat, ("POST",), ChatRequest),
    "/v1/completions": (completions, ("POST",), CompletionRequest),
    "/v1/models": (pages.models, ("GET",), None),
    "/v1/models/{id:path}": (pages.model, ("GET",), None),
    "/tokenize": (tokens.tokenize, ("POST",), TokenizeRequest),
    "/v1/tokenize": (tokens.tokenize, ("POST",), TokenizeRequest),
    "/detokenize": (tokens.detokenize, ("POST",), DetokenizeRequest),
    "/v1/detokenize": (tokens.detokenize, ("POST",), DetokenizeRequest),
    "/health": (pages.health, ("GET", "HEAD"), None),
    "/v1/health": (pages.health, ("GET", "HEAD"), None),
    "/ping": (pages.health, ("GET", "POST"), None),
    "/ready": (pages.health, ("GET", "HEAD"), None),
    "/version": (pages.version, ("GET",), None),
    "/metrics": (pages.metrics, ("GET",), None),
    "/admin/stats": (pages.stats, ("GET",), None),
    "/": (pages.root, ("GET",), None),
}


def create_app(
    settings: ServerSettings,
    engine: Engine,
    text: Text,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Return the app. Starting and ending the engine is up to whoever made it.

    `app.state.lifecycle` is what the command line's signal handler talks to (`begin_drain`,
    `drain`), so is `app.state.keys` (`reload`), and `app.state.service` is everything else.
    `clock` (seconds) is what rate limits go by.
    """
    _quiet_sse()
    lifecycle = Lifecycle(engine)
    metrics = Metrics(settings, engine)
    service = Service(settings, engine, text, lifecycle, metrics)
    app = FastAPI(
        title="Moestro",
        version=pages.VERSION,
        redirect_slashes=False,
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        lifespan=_lifespan(text),
    )
    app.state.service = service
    app.state.lifecycle = lifecycle
    app.state.keys = KeyRing(settings.api_key_hashes, settings.api_key_file)
    for path, (handler, methods, model) in ROUTES.items():
        for method in methods:
            _add(app, path, handler, method, model if settings.docs else None)
    app.add_exception_handler(MoestroError, problems.handle)
    app.add_exception_handler(HTTPException, problems.handle)
    limiter = RateLimiter(settings.rate_limit, clock) if settings.rate_limit else None
    _wrap(app, settings, limiter)
    app.add_middleware(Edge, settings=settings, lifecycle=lifecycle, record=metrics.http)
    return app


def _wrap(app: FastAPI, settings: ServerSettings, limiter: RateLimiter | None) -> None:
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, settings=settings)
    if limiter is not None:
        app.add_middleware(RateLimit, limiter=limiter)
    if app.state.keys:
        app.add_middleware(KeyCheck, ring=app.state.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )


def _lifespan(text: Text) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            text.close()

    return lifespan


def _quiet_sse() -> None:
    """Keep the SSE library from two habits.

    It logs every chunk at debug level, and those are what the model wrote; and it cuts all streams
    when the process gets SIGTERM, which is what draining is there to avoid.
    """
    logging.getLogger("sse_starlette").setLevel(logging.WARNING)
    AppStatus.enable_automatic_graceful_drain = False


def _add(app: FastAPI, path: str, handler: Handler, method: str, model: type[Wire] | None) -> None:
    async def endpoint(request: Request) -> Response:
        service: Service = request.app.state.service
        return await handler(request, service)

    slug = path.replace("/", "_").replace("{id:path}", "id")
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=handler.__name__,
        operation_id=f"{method.lower()}{slug}",
        description=handler.__doc__,
        response_model=None,
        response_class=Response,
        openapi_extra=_described(model),
        include_in_schema=method != "HEAD",
    )


def _described(model: type[Wire] | None) -> dict[str, Any] | None:
    """Return the documentation of a body that the route reads by itself."""
    if model is None:
        return None
    schema = model.model_json_schema(ref_template="{model}")
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, named: dict[str, Any]) -> Any:
    """Put named parts where they are referred to: the page has no other place for them."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(named[schema["$ref"]], named)
        return {key: _inlined(value, named) for key, value in schema.items()}
    return [_inlined(item, named) for item in schema] if isinstance(schema, list) else schema
