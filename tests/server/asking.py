"""What became of a request: what reached the engine, or the error."""

from __future__ import annotations

from typing import Any

from moestro.types import SamplingParams
from tests.server.conftest import Server


async def sampled(server: Server, path: str = "complete", **fields: Any) -> SamplingParams:
    """What reached the engine."""
    ask = server.chat if path == "chat" else server.complete
    response = await ask(**fields)
    assert response.status_code == 200, response.text
    return server.engine.opened[-1].sampling


async def refused(server: Server, path: str = "complete", **fields: Any) -> dict[str, Any]:
    """The error, after checking that nothing reached the engine and that the server goes on."""
    before = len(server.engine.opened)
    ask = server.chat if path == "chat" else server.complete
    response = await ask(**fields)
    assert response.status_code == 400, response.text
    assert len(server.engine.opened) == before
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    found: dict[str, Any] = error
    return found
