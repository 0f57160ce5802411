"""OpenTelemetry traces. Owns: one span for each request, with where its time went, and sending
them. Never holds what a user wrote or the model said.

The packages are optional (`moestro[otel]`): this is the only module that imports them, inside
functions, and `Tracing` is made only when --otlp-endpoint is set.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moestro.errors import ConfigError
from moestro.server.auth import OPEN_PATHS
from moestro.server.edge import METHODS, REQUEST_ID
from moestro.server.prometheus import Finished

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

NANO = 10**9
TRACE = "moestro.trace"  # scope key; the `RequestTrace` of the request
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
FLUSH = 5.0  # seconds that the last spans have at the end


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigError unless spans can be sent to `endpoint` (None: they are not wanted)."""
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-endpoint {endpoint}: should be an http:// or https:// address, such as "
            "http://127.0.0.1:4318",
            param="otlp_endpoint",
        )
    if not all(map(_found, PACKAGES)):
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry: pip install 'moestro[otel]'",
            param="otlp_endpoint",
        )


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent is missing
        return False


def traces_url(endpoint: str) -> str:
    """Where spans go: an address without a path means the path that OTLP prescribes."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


class Tracing:
    """Makes spans and sends them in the background, in batches."""

    def __init__(
        self, model: str, version: str, exporter: SpanExporter, *, now: bool = False
    ) -> None:
        """`model` is the served name. `now`: send each span at once, for tests."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        resource = Resource.create({"service.name": "moestro", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = SimpleSpanProcessor(exporter) if now else BatchSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("moestro", version)
        self._model = model

    @staticmethod
    def to(endpoint: str, model: str, version: str) -> Tracing:
        """Traces that go to an OTLP collector over HTTP."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return Tracing(model, version, OTLPSpanExporter(endpoint=traces_url(endpoint)))

    def begin(self, scope: Scope) -> RequestTrace:
        """The span of a request begins, in the trace that its traceparent header names."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        context = TraceContextTextMapPropagator().extract(carrier)
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        span = self._tracer.start_span(
            method, context, SpanKind.SERVER, attributes={"http.request.method": method}
        )
        return RequestTrace(self, span)

    def phase(self, parent: Span, name: str, start: int, end: int, choice: int) -> None:
        """A part of a request's time, in nanoseconds of the wall clock."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name,
            set_span_in_context(parent),
            start_time=start,
            attributes={"moestro.choice": choice},
        )
        span.end(end)

    @property
    def model(self) -> str:
        """The served name."""
        return self._model

    def close(self) -> None:
        """Send what is left. Blocks for a few seconds at most."""
        self._provider.force_flush(int(FLUSH * 1000))
        self._provider.shutdown()


class RequestTrace:
    """The span of one request, and what happens to it."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._begun = time.time_ns()
        self._prompt = self._completion = self._cached = 0
        self._finishes: list[str] = []

    def observer(self, n: int) -> Callable[[int, Finished], None]:
        """What hears of each choice's end, for a call with `n` choices for each prompt."""
        return lambda index, finished: self._choice(index, finished, first=index % n == 0)

    def _choice(self, index: int, finished: Finished, *, first: bool) -> None:
        """One choice has ended, just now; `first` is that of its prompt."""
        self._prompt += finished.prompt_tokens if first else 0
        self._completion += finished.completion_tokens
        self._finishes.append(finished.finish.value)
        timing = finished.timing
        if timing is None:
            return
        self._cached += timing.cached_tokens if first else 0
        end = time.time_ns()
        spans = (("decode", timing.decode), ("prefill", timing.prefill), ("queued", timing.queued))
        for name, seconds in spans:  # from the end back to the start
            start = max(self._begun, end - int(seconds * NANO))
            self._tracing.phase(self._span, name, start, end, index)
            end = start
        self._span.set_attribute("moestro.exposed_fetch_seconds", timing.exposed_fetch)
        self._span.set_attribute("moestro.preemptions", timing.preemptions)

    def end(self, scope: Scope, status: int) -> None:
        """The reply is over. `status` 0: the client left before there was one."""
        from opentelemetry.trace import StatusCode

        span, route = self._span, getattr(scope.get("route"), "path", None)
        if route is not None:
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
        span.set_attribute("moestro.request_id", scope.get(REQUEST_ID, ""))
        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        if self._finishes:
            span.set_attributes(
                {
                    "gen_ai.request.model": self._tracing.model,
                    "gen_ai.usage.input_tokens": self._prompt,
                    "gen_ai.usage.output_tokens": self._completion,
                    "gen_ai.response.finish_reasons": self._finishes,
                    "moestro.cached_tokens": self._cached,
                }
            )
        span.end()


class TraceRequests:
    """Gives every request its span, but for probes and scrapes. Stands just inside `Edge`."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        trace: RequestTrace = self._tracing.begin(scope)
        scope[TRACE] = trace
        status = 0

        async def heard(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, heard)
        except Exception:
            status = status or 500
            raise
        finally:
            trace.end(scope, status)
