"""Reading /metrics."""

from __future__ import annotations

from tests.server.conftest import Server


async def samples(server: Server) -> dict[str, float]:
    """Every sample of /metrics by its full name."""
    response = await server.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for line in response.text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def series(name: str, **labels: str) -> str:
    labels = {"engine": "0", "model_name": "tiny", **labels}
    inner = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
    return f"moestro:{name}{{{inner}}}"
