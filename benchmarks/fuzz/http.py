"""Requests as bytes, and the routes they go to.

Owns: a well-formed request, and what a document says of the routes. Does not own: what is wrong
with a request (`bodies`, `framing`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.fuzz.values import example

Dice = random.Random
Make = Callable[[str, Dice, "Route"], "Hostile"]


@dataclass(frozen=True)
class Route:
    """One operation of the document; `body` is one that it takes, or None."""

    method: str
    path: str
    body: dict[str, Any] | None


@dataclass(frozen=True)
class Hostile:
    """Bytes to send on one connection."""

    kind: str
    data: bytes
    path: str
    whole: bool = True  # an answer is due; else the server may wait for more, or just close
    head: bool = False


def routes(document: dict[str, Any]) -> list[Route]:
    """All operations of an OpenAPI document, with a small valid body for each that takes one."""
    return list(_routes(document))


def _routes(document: dict[str, Any]) -> Iterator[Route]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema")
            body = None if schema is None else example(schema, path)
            yield Route(method.upper(), path, body)


def plain(
    route: Route, dice: Dice, body: bytes, *extra: bytes, length: bytes | None = b""
) -> bytes:
    """A well-formed request, but for what is asked otherwise. `length=None`: without one."""
    path = route.path.replace("{", "").replace("}", "")
    lines = [f"{route.method} {path} HTTP/1.1".encode(), b"Host: 127.0.0.1"]
    if not any(line.lower().startswith(b"content-type") for line in extra):
        lines.append(b"Content-Type: application/json")
    if length is not None:
        lines.append(b"Content-Length: " + (length or b"%d" % len(body)))
    return b"\r\n".join([*lines, b"Connection: close", *extra, b"", body])


def json_of(route: Route) -> bytes:
    """The route's body, or some body."""
    return json.dumps(route.body or {"prompt": "x"}).encode()
