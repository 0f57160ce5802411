"""The FastAPI app. Owns: which route goes where and what is wrapped around all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from moestro.config import Config
from moestro.errors import MoestroError
from moestro.server import batches_routes, config_routes, pages, problems, tokens
from moestro.server.background import Background
from moestro.server.batches import Batches
from moestro.server.chat import prepare_chat
from moestro.server.chat_wire import ChatWire
from moestro.server.completion_wire import CompletionWire
from moestro.server.completions import prepare_completion
from moestro.server.edge import BodyLimit, Edge, KeyCheck, RateLimit
from moestro.server.engine_port import Engine
from moestro.server.files_store import FileStore
from moestro.server.keys import KeyRing
from moestro.server.lifecycle import Lifecycle
from moestro.server.live_config import LiveConfig
from moestro.server.messages import count_tokens, prepare_messages
from moestro.server.messages_schema import CountTokensRequest, MessagesRequest
from moestro.server.messages_wire import MessagesWire
from moestro.server.otel import TraceRequests, Tracing
from moestro.server.prometheus import Metrics
from moestro.server.rate_limit import RateLimiter
from moestro.server.responses import prepare_responses
from moestro.server.responses_schema import ResponsesRequest
from moestro.server.responses_wire import ResponsesWire
from moestro.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Wire,
)
from moestro.server.service import Service, answer, info_of, vocabulary_of
from moestro.server.settings import ServerSettings
from moestro.server.structured_check import Check, Grammars, Trials
from moestro.server.text import Text

Handler = Callable[[Request, Service], Awaitable[Response]]


async def chat(request: Request, service: Service) -> Response:
    """Continue a conversation."""
    return await answer(request, service, prepare_chat, ChatWire)


async def completions(request: Request, service: Service) -> Response:
    """Continue one or more prompts."""
    return await answer(request, service, prepare_completion, CompletionWire)


async def respond(request: Request, service: Service) -> Response:
    """Answer an input of items, in the form of OpenAI's Responses."""
    return await answer(request, service, prepare_responses, ResponsesWire)


async def message(request: Request, service: Service) -> Response:
    """Continue a conversation, in the form of Anthropic's Messages."""
    return await answer(request, service, prepare_messages, MessagesWire)


# path -> (handler, methods, body model for the documentation)
ROUTES: dict[str, tuple[Handler, tuple[str, ...], type[Wire] | None]] = {
    "/v1/chat/completions": (chat, ("POST",), ChatRequest),
    "/v1/completions": (completions, ("POST",), CompletionRequest),
    "/v1/responses": (respond, ("POST",), ResponsesRequest),
    "/v1/messages": (message, ("POST",), MessagesRequest),
    "/v1/messages/count_tokens": (count_tokens, ("POST",), CountTokensRequest),
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

BATCHED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # what a batch may ask


def create_app(
    settings: ServerSettings,
    engine: Engine,
    text: Text,
    *,
    config: Config | None = None,
    check: Check | None = None,
    tracing: Tracing | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Return the app. Starting and ending the engine is up to whoever made it.

    `app.state.lifecycle` is what the command line's signal handler talks to (`begin_drain`,
    `drain`), so is `app.state.keys` (`reload`), and `app.state.service` is everything else.
    `app.state.batches` (None without files) is a context to be entered while the app serves; its
    lifespan does that too. `config` is what /v1/config shows and changes. `check` tries grammars;
    the checkpoint's tokenizer does when it is None. `tracing` gets a span of each request.
    `clock` (seconds) is what rate limits go by. Raises ConfigError when the files' folder cannot
    be used.
    """
    _quiet_sse()
    lifecycle = Lifecycle(engine)
    metrics = Metrics(settings, engine)
    live = LiveConfig(settings, engine, config)
    trials = Trials(text.folder, lambda: vocabulary_of(info_of(engine), live.settings))
    grammars = Grammars(check or trials, text.tokenizer.special_id)
    background = _background(live, engine)
    service = Service(live, engine, text, lifecycle, metrics, background, grammars)
    if settings.files_dir is not None:
        files = FileStore(
            settings.files_dir, max_file=settings.max_file_size, quota=settings.files_quota
        )
        service = replace(service, files=files)
    app = FastAPI(
        title="Moestro",
        version=pages.VERSION,
        redirect_slashes=False,
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        lifespan=_lifespan(text, grammars),
    )
    app.state.service = service
    app.state.lifecycle = lifecycle
    app.state.keys = KeyRing(settings.api_key_hashes, settings.api_key_file)
    app.state.batches = None
    if service.files is not None:
        handlers = {path: ROUTES[path][0] for path in BATCHED}
        app.state.batches = Batches(service, service.files, handlers)
    for path, (handler, methods, model) in ROUTES.items():
        for method in methods:
            _add(app, path, handler, method, model if settings.docs else None)
    for method, path, handler in (*batches_routes.ROUTES, *config_routes.ROUTES):
        _add(app, path, handler, method, None)
    app.add_exception_handler(MoestroError, problems.handle)
    app.add_exception_handler(HTTPException, problems.handle)
    limiter = RateLimiter(settings.rate_limit, clock)
    live.on_change.append(lambda settings: limiter.change(settings.rate_limit))
    _wrap(app, live, limiter)
    if tracing is not None:
        app.add_middleware(TraceRequests, tracing=tracing)
    app.add_middleware(
        Edge, settings=lambda: live.settings, lifecycle=lifecycle, record=metrics.http
    )
    return app


def _background(live: LiveConfig, engine: Engine) -> Background:
    return Background(
        limit=lambda: live.settings.batch_seqs,
        free=lambda: live.settings.max_num_seqs - engine.foreground,
    )


def _wrap(app: FastAPI, live: LiveConfig, limiter: RateLimiter) -> None:
    # The last one added is the outermost.
    settings = live.settings
    app.add_middleware(BodyLimit, settings=lambda: live.settings)
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


def _lifespan(text: Text, grammars: Grammars) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with app.state.batches or nullcontext():
                yield
        finally:
            text.close()
            grammars.close()

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

    slug = path.replace("/", "_").replace("{id:path}", "id").replace("{id}", "id")
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
