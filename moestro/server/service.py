"""What the routes share, in one frozen value, and the path every generating call takes.

Owns: model names, the limits that hold, and the order of a call's stages. Does not own: any stage.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moestro.engine.messages import EngineInfo
from moestro.errors import MoestroError, Unavailable
from moestro.server.background import BACKGROUND, Background, in_background
from moestro.server.call import Call
from moestro.server.deadline import Deadline
from moestro.server.edge import REQUEST_ID, header, label_of
from moestro.server.engine_port import Engine
from moestro.server.files_store import FileStore
from moestro.server.generation import Generation
from moestro.server.lifecycle import Lifecycle
from moestro.server.live_config import LiveConfig
from moestro.server.otel import TRACE, RequestTrace
from moestro.server.problems import UnknownModel
from moestro.server.prometheus import Metrics
from moestro.server.refusals import UnknownKeys
from moestro.server.reply import ClientGone, TokenStream, Wire, collect, unless_gone
from moestro.server.sampling import Vocabulary
from moestro.server.settings import ServerSettings
from moestro.server.structured_check import Grammars
from moestro.server.text import Text
from moestro.server.tokenizer import Tokenizer
from moestro.server.wire import parse


@dataclass(frozen=True, slots=True)
class Service:
    """The parts a route needs. One per app."""

    live: LiveConfig
    engine: Engine
    text: Text
    lifecycle: Lifecycle
    metrics: Metrics
    background: Background
    grammars: Grammars
    files: FileStore | None = None  # None: the server keeps none
    unknown: UnknownKeys = field(default_factory=UnknownKeys)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def settings(self) -> ServerSettings:
        """The settings that hold now."""
        return self.live.settings

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer under. Raises `UnknownModel`, without repeating what came."""
        names = self.settings.served_model_names
        if not asked:
            return names[0]
        if asked in names:
            return asked
        if self.settings.accept_any_model:
            return names[0]
        raise UnknownModel(
            f"The model asked for is not served here; available: {', '.join(names)}.",
            param="model",
        )

    def info(self) -> EngineInfo:
        """Return the engine's limits. Raises `Unavailable` before they are known."""
        return info_of(self.engine)

    def vocabulary(self) -> Vocabulary:
        """Return what token ids may be and which of them end a text."""
        return vocabulary_of(self.info(), self.settings)


def info_of(engine: Engine) -> EngineInfo:
    """Return the engine's limits. Raises `Unavailable` before they are known."""
    if engine.info is None:
        raise Unavailable("The model is still loading.", code="loading")
    return engine.info


def vocabulary_of(info: EngineInfo, settings: ServerSettings) -> Vocabulary:
    """Return what token ids may be, by the engine and by the checkpoint's defaults."""
    known = (*info.eos_token_ids, *settings.defaults.eos_token_ids)
    eos = tuple(i for i in dict.fromkeys(known) if i < info.vocab_size)
    return Vocabulary(info.vocab_size, eos)


async def body_of(request: Request) -> dict[str, Any]:
    """Return the request's JSON object, with its label put where the reply's headers find it."""
    body = parse(await request.body(), request.headers.get("content-type"))
    label = body.get("request_id")
    if header(request.scope, b"x-request-id") is None and isinstance(label, str):
        request.scope[REQUEST_ID] = label_of(label) or request.scope[REQUEST_ID]
    return body


Prepare = Callable[[Service, dict[str, Any], float], Awaitable[Call]]
MakeWire = Callable[[Call, Tokenizer], Wire]


async def answer(
    request: Request, service: Service, prepare: Prepare, make_wire: MakeWire
) -> Response:
    """Serve one generating call: refuse, read, prepare, admit, reply.

    Everything up to admission answers with a real status, streamed or not.
    """
    arrived = time.monotonic()
    try:
        service.lifecycle.admit()
    except MoestroError as error:
        service.metrics.rejected(error.code)
        raise
    background = request.scope.get(BACKGROUND, False)  # nobody waits, so nobody is impatient
    deadline = Deadline(arrived, 0.0 if background else service.settings.request_timeout)
    async with deadline.hold():
        return await _admitted(request, service, prepare, make_wire, arrived, deadline)


async def _behind_others(call: Call, service: Service, make_wire: MakeWire) -> Response:
    async with service.background.seats(len(call.requests)):
        call = in_background(call)
        generation = Generation(call, service.text.tokenizer, service.metrics)
        generation.open(service.engine)
        return await collect(generation, make_wire(call, service.text.tokenizer))


async def _admitted(
    request: Request,
    service: Service,
    prepare: Prepare,
    make_wire: MakeWire,
    arrived: float,
    deadline: Deadline,
) -> Response:
    body = await body_of(request)

    async def prepared() -> Call:
        return await prepare(service, body, arrived)

    try:
        call = await unless_gone(request, prepared())
        if request.scope.get(BACKGROUND):
            return await _behind_others(call, service, make_wire)
        trace: RequestTrace | None = request.scope.get(TRACE)
        observer = None if trace is None else trace.observer(call.n)
        generation = Generation(call, service.text.tokenizer, service.metrics, observer)
        wire = make_wire(call, service.text.tokenizer)
        if call.output.stream:
            stream = TokenStream(generation, wire, service.settings, deadline)
            generation.open(service.engine)
            return stream
        generation.open(service.engine)
        return await unless_gone(request, collect(generation, wire))
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
