"""/v1/batches. Owns: what its routes accept, and the list of them and of those of `files`.

The batches are `batches`' business.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moestro.errors import InvalidRequest
from moestro.server.batches import Batches
from moestro.server.batches_state import Batch, metadata_of, window_of
from moestro.server.files import (
    delete_file,
    file_content,
    lifetime_of,
    limit_of,
    list_files,
    owner,
    page,
    retrieve_file,
    store_of,
    upload_file,
)
from moestro.server.service import Service, body_of
from moestro.server.wire import reply

DEFAULT_PAGE, MOST_PAGE = 20, 100
KNOWN = frozenset(
    {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}
)


def batches_of(request: Request, service: Service) -> Batches:
    """The batches. Raises NotFound when the server runs none."""
    store_of(service)
    batches: Batches = request.app.state.batches
    return batches


async def create_batch(request: Request, service: Service) -> Response:
    """Start a batch over an uploaded file of requests."""
    batches = batches_of(request, service)
    body = await body_of(request)
    for name in body.keys() - KNOWN:
        service.unknown.note(name)
    endpoint = _text(body, "endpoint")
    if endpoint not in batches.endpoints:
        raise InvalidRequest(
            f"'endpoint' may be {', '.join(batches.endpoints)} here.", param="endpoint"
        )
    lifetime = body.get("output_expires_after")
    batch = await batches.create(
        owner(request),
        window_of(body.get("completion_window")),
        endpoint=endpoint,
        input_file_id=_text(body, "input_file_id"),
        completion_window=body["completion_window"],
        metadata=metadata_of(body.get("metadata")),
        output_lifetime=None if lifetime is None else lifetime_of(lifetime, "output_expires_after"),
    )
    return reply(batch.json())


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"'{name}' is required, as text.", param=name)
    return value


async def list_batches(request: Request, service: Service) -> Response:
    """List the caller's batches, the newest first."""
    found = batches_of(request, service).batches_of(owner(request))
    query = request.query_params
    limit = limit_of(query, DEFAULT_PAGE, MOST_PAGE)
    return reply(page(found, query.get("after"), limit, Batch.json))


async def retrieve_batch(request: Request, service: Service) -> Response:
    """Describe one batch."""
    return reply(_asked(request, service).json())


async def cancel_batch(request: Request, service: Service) -> Response:
    """Stop a batch; what has been answered stays."""
    batch = _asked(request, service)
    await batches_of(request, service).cancel(batch)
    return reply(batch.json())


def _asked(request: Request, service: Service) -> Batch:
    return batches_of(request, service).get(request.path_params["id"], owner(request))


# method, path, handler
ROUTES = (
    ("POST", "/v1/files", upload_file),
    ("GET", "/v1/files", list_files),
    ("GET", "/v1/files/{id}", retrieve_file),
    ("GET", "/v1/files/{id}/content", file_content),
    ("DELETE", "/v1/files/{id}", delete_file),
    ("POST", "/v1/batches", create_batch),
    ("GET", "/v1/batches", list_batches),
    ("GET", "/v1/batches/{id}", retrieve_batch),
    ("POST", "/v1/batches/{id}/cancel", cancel_batch),
)
