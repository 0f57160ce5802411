"""A short, seeded part of `benchmarks.fuzz`, against an engine without a model."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.fuzz import verdict
from benchmarks.fuzz.by_bytes import KINDS, ByteFuzz, hostile
from benchmarks.fuzz.by_schema import SchemaFuzz, unique
from benchmarks.fuzz.http import routes
from tests.server.conftest import Make

DOCS = {"docs": True, "template_timeout": 2.0}
BYTES = 25 * len(KINDS)
SCHEMA = 120


async def test_bytes(listen: Make) -> None:
    async with listen("hello", settings=DOCS) as server:
        known = routes(server.app.openapi())
        fuzz = ByteFuzz(server.port, known, seed=1, timeout=10)
        await fuzz.run(BYTES)
        assert list(unique(fuzz.faults)) == []
        assert sum(fuzz.statuses.values()) == BYTES
        assert fuzz.statuses[200] > BYTES / 10  # the rest of many requests is right
        assert fuzz.statuses[400] > BYTES / 4
        await server.idle()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_by_our_own_document(listen: Make) -> None:
    async with listen("hello", settings=DOCS) as server:

        def run() -> SchemaFuzz:
            fuzz = SchemaFuzz(f"http://127.0.0.1:{server.port}", seed=1, timeout=10)
            fuzz.run(SCHEMA)
            return fuzz

        fuzz = await asyncio.to_thread(run)
        assert list(unique(fuzz.faults)) == []
        assert sum(fuzz.statuses.values()) > SCHEMA / 2
        assert fuzz.statuses[400] > 0
        await server.idle()


async def test_a_number_gives_the_same_bytes_again(listen: Make) -> None:
    async with listen("hello", settings=DOCS) as server:
        known = routes(server.app.openapi())
    bodies = {route.path: route.body for route in known if route.body is not None}
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize"} <= bodies.keys()
    assert bodies["/v1/completions"] == {"prompt": "x", "max_tokens": 3}
    assert [hostile(known, n, 7) for n in range(99)] == [hostile(known, n, 7) for n in range(99)]
    assert hostile(known, 0, 7) != hostile(known, 0, 8)


JSON = "application/json"
ERROR = b'{"error":{"message":"m","type":"t","param":null,"code":null}}'


@pytest.mark.parametrize(
    ("status", "kind", "body", "wrong"),
    [
        (400, JSON, ERROR, ""),
        (400, "text/plain", ERROR, "content type"),
        (404, JSON, b'{"detail":"x"}', "without an error object"),
        (404, JSON, b'{"error":"x"}', "an error object without"),
        (422, JSON, b'{"error":{"message":"","type":"t","param":null,"code":null}}', "empty"),
        (422, JSON, b'{"error":{"message":"m","type":"t"}}', "an error object without"),
        (503, JSON, ERROR, "status 503"),
        (200, JSON, b"{}", ""),
        (200, JSON, b"{", "broken JSON"),
        (200, "text/event-stream", b'data: {"choices":[]}\n\ndata: [DONE]\n\n', ""),
        (200, "text/event-stream", b'data: {"choices":[]}\n\ndata: {"ch', "cut"),
        (200, "text/event-stream", b"data: " + ERROR + b"\n\n", "an error in a stream"),
    ],
)
def test_what_counts_as_a_fault(status: int, kind: str, body: bytes, wrong: str) -> None:
    found = verdict.fault("/v1/completions", status, kind, body)
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_the_messages_api_spells_errors_its_own_way() -> None:
    body = b'{"type":"error","error":{"type":"t","message":"m"}}'
    assert verdict.fault("/v1/messages", 400, JSON, body) == ""
    assert verdict.fault("/v1/messages_x", 400, JSON, body) != ""
