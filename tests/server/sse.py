"""Reading a server-sent event stream as strictly as the pickiest client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

PREFIX = "data: "


@dataclass
class Events:
    """The JSON events of one stream, in order."""

    chunks: list[dict[str, Any]]

    def of(self, index: int) -> list[dict[str, Any]]:
        """The parts of one choice."""
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for choice in self.of(index)
        )

    def finish(self, index: int = 0) -> str:
        reasons = [c["finish_reason"] for c in self.of(index) if c["finish_reason"] is not None]
        assert len(reasons) == 1, reasons
        return str(reasons[0])

    @property
    def usage(self) -> dict[str, Any] | None:
        found = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return found[-1] if found else None

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [chunk["error"] for chunk in self.chunks if "error" in chunk]


def parse(body: bytes) -> Events:
    """Check the framing: ASCII, one data line per event, [DONE] last and once."""
    text = body.decode("ascii")
    assert text.endswith("data: [DONE]\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = []
    for event in events[:-1]:
        assert event.startswith(PREFIX)
        assert "\n" not in event
        chunks.append(json.loads(event.removeprefix(PREFIX)))
    return Events(chunks)


def events_of(response: httpx.Response) -> Events:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse(response.content)


def typed(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream whose events are named: each name is its value's type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    text = response.content.decode("ascii")
    assert text.endswith("\n\n")
    found = []
    for one in text.removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        value = json.loads(data.removeprefix(PREFIX))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found
