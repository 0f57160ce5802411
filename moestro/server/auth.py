"""API keys. Owns: reading a key from the headers and comparing it. Knows keys only as digests."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from moestro.errors import BadKey

# Reachable without a key: probes, scrapes and the pages that describe the API. Nothing here
# costs engine time or shows what other users do.
OPEN_PATHS = frozenset(
    {
        "/",
        "/health",
        "/v1/health",
        "/ping",
        "/ready",
        "/version",
        "/metrics",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
    }
)


def hash_key(key: str) -> bytes:
    """SHA-256 digest of a key, the only form in which the server keeps it."""
    return hashlib.sha256(key.encode()).digest()


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key that the request carries, from `Authorization: Bearer` or `x-api-key`."""
    found: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        elif name == b"x-api-key":
            found = value.strip()
    return found


def check_key(headers: Iterable[tuple[bytes, bytes]], accepted: Sequence[bytes]) -> int:
    """Which of the accepted keys the request carries, as its place. Raises `BadKey`.

    Every digest is compared, so that the time taken says nothing about which one matched.
    """
    key = key_of(headers)
    if key is None:
        raise BadKey("An API key is required: send 'Authorization: Bearer <key>' or 'x-api-key'.")
    digest = hashlib.sha256(key).digest()
    matches = [hmac.compare_digest(digest, known) for known in accepted]
    if not any(matches):
        raise BadKey("The API key is not valid.")
    return matches.index(True)
