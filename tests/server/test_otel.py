"""Traces: a span for each request, its parts, and no text."""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from moestro.config import Config
from moestro.errors import ConfigError
from moestro.server import otel
from moestro.server.app import create_app
from moestro.server.doors import check_doors
from moestro.server.otel import Tracing, check_endpoint, traces_url
from moestro.server.settings import ServerSettings
from moestro.server.template import ChatTemplate
from moestro.server.text import Text
from moestro.server.tokenizer import Tokenizer
from tests.fakes import SPECIAL, TEMPLATE, FakeEngine, byte_tokenizer, spelled

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NANO = 10**9


@asynccontextmanager
async def traced(exporter: InMemorySpanExporter) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = Tokenizer(byte_tokenizer(), {"eos_token": SPECIAL[1]})
    text = Text(tokenizer, ChatTemplate(TEMPLATE, tokenizer.special_tokens, seconds=0.5))
    engine = FakeEngine(lambda _: spelled("said"))
    tracing = Tracing("tiny", "1", exporter, now=True)
    app = create_app(ServerSettings(("tiny",), docs=False), engine, text, tracing=tracing)
    await engine.start()
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        await asyncio.to_thread(tracing.close)
        text.close()
        await engine.aclose()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_its_parts(stream: bool) -> None:
    exporter = InMemorySpanExporter()
    async with traced(exporter) as client:
        body = {
            "messages": [{"role": "user", "content": "a-secret"}],
            "max_tokens": 3,
            "stream": stream,
        }
        headers = {"traceparent": PARENT, "x-request-id": "job-7"}
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200
        (span,) = named(exporter, "POST /v1/chat/completions")
    assert span.kind is SpanKind.SERVER
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.resource.attributes["service.name"] == "moestro"
    found = dict(span.attributes or {})
    assert found["http.route"] == "/v1/chat/completions"
    assert found["http.response.status_code"] == 200
    assert found["moestro.request_id"] == "job-7"
    assert found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["moestro.cached_tokens"] == 3
    parts = [named(exporter, name)[0] for name in ("queued", "prefill", "decode")]
    for part in parts:
        assert part.parent is not None
        assert part.parent.span_id == span.context.span_id
    # They lie one behind the other, within the request.
    times = [time for part in parts for time in (part.start_time or 0, part.end_time or 0)]
    assert times == sorted(times)
    assert times[1:4:2] == times[2:5:2]
    assert times[0] >= (span.start_time or 0)
    assert times[-1] <= (span.end_time or 0)
    everything = " ".join(span.to_json() for span in exporter.get_finished_spans())
    assert "secret" not in everything
    assert "said" not in everything


async def test_choices_have_parts_of_their_own() -> None:
    exporter = InMemorySpanExporter()
    async with traced(exporter) as client:
        body = {"prompt": ["abc", "de"], "max_tokens": 1, "n": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        (span,) = named(exporter, "POST /v1/completions")
        assert (span.attributes or {})["gen_ai.usage.input_tokens"] == 5  # each prompt once
        assert (span.attributes or {})["gen_ai.usage.output_tokens"] == 4
        assert span.parent is None
        choices = [(part.attributes or {})["moestro.choice"] for part in named(exporter, "decode")]
        assert sorted(map(str, choices)) == ["0", "1", "2", "3"]


async def test_errors_and_probes() -> None:
    exporter = InMemorySpanExporter()
    async with traced(exporter) as client:
        await client.get("/health")
        await client.get("/metrics")
        assert exporter.get_finished_spans() == ()
        await client.post("/v1/completions", json={"prompt": "x", "n": 0})
        (span,) = named(exporter, "POST /v1/completions")
        assert (span.attributes or {})["http.response.status_code"] == 400
        assert span.status.status_code is StatusCode.UNSET  # the client's mistake
        headers = {"traceparent": "not-one"}
        await client.get("/nowhere/a-secret", headers=headers)
        (span,) = named(exporter, "GET")
        assert (span.attributes or {})["http.response.status_code"] == 404
        assert "secret" not in span.to_json()
        assert span.parent is None


async def test_an_internal_error_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    async with traced(exporter) as client:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("a-secret")

        monkeypatch.setattr("moestro.server.completions.validate", fail)
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 500
        (span,) = named(exporter, "POST /v1/completions")
        assert span.status.status_code is StatusCode.ERROR
        assert "secret" not in span.to_json()


def test_where_spans_go() -> None:
    assert traces_url("http://h:4318") == "http://h:4318/v1/traces"
    assert traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert traces_url("https://h/otlp/x") == "https://h/otlp/x"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://h:4317", "http://", "file:///x"])
def test_bad_addresses_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"should be an http:// or https://"):
        check_doors(Config(otlp_endpoint=endpoint))


def test_without_the_package_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_endpoint("http://h:4318")
    monkeypatch.setattr(otel.importlib.util, "find_spec", lambda _: None)
    check_endpoint(None)
    with pytest.raises(ConfigError, match=r"pip install 'moestro\[otel\]'"):
        check_endpoint("http://h:4318")


def test_without_the_flag_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert not name.startswith("opentelemetry.sdk"), name
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    text = Text(Tokenizer(byte_tokenizer(), {}), None)
    create_app(ServerSettings(("tiny",), docs=False), FakeEngine(lambda _: [97]), text)
    text.close()


class _Collector(BaseHTTPRequestHandler):
    got: list[tuple[str, str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, self.headers["content-type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_spans_reach_a_collector() -> None:
    handler = type("Handler", (_Collector,), {"got": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tracing = Tracing.to(f"http://127.0.0.1:{server.server_port}", "tiny", "1")
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        tracing.begin(scope).end(scope, 200)
        tracing.close()
        ((path, kind, body),) = handler.got  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    assert b"moestro" in body
