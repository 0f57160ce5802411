"""/v1/files. Owns: the wire shape of files and lists, and what the routes accept.

Does not own: the bytes (`files_store`), or the form they come in (`files_upload`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from moestro.errors import InvalidRequest, NotFound
from moestro.server.edge import KEY
from moestro.server.files_store import FileStore, StoredFile, owner_of
from moestro.server.files_upload import Upload, give_up, receive
from moestro.server.service import Service
from moestro.server.wire import reply

UPLOAD = "batch"  # the one purpose that a client may give
PURPOSES = (UPLOAD, "batch_output")
MOST_FILES = 10_000  # in one page of a list
SHORTEST, LONGEST = 3600, 30 * 86400  # seconds until a file may expire


class HasId(Protocol):
    """What a list is made of."""

    @property
    def id(self) -> str:
        """Its id."""
        ...


Item = TypeVar("Item", bound=HasId)


def owner(request: Request) -> str:
    """Whose files this request may see."""
    return owner_of(request.scope.get(KEY))


def store_of(service: Service) -> FileStore:
    """The files. Raises NotFound when the server keeps none."""
    if service.files is None:
        raise NotFound("This server keeps no files and runs no batches; --files-dir turns both on.")
    return service.files


def file_json(file: StoredFile) -> dict[str, Any]:
    """A file on the wire."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


async def upload_file(request: Request, service: Service) -> Response:
    """Take a file in, as a form with `file` and `purpose`."""
    store = store_of(service)
    await asyncio.to_thread(store.sweep)
    upload = await receive(request.stream(), request.headers.get("content-type"), store)
    try:
        file = _described(upload, owner(request), store, service)
        await asyncio.to_thread(store.add, file)
    except BaseException:
        give_up(upload, store)
        raise
    store.shrink(upload.size)  # `add` counts it from here on
    return reply(file_json(file))


def _described(upload: Upload, owner: str, store: FileStore, service: Service) -> StoredFile:
    fields = dict(upload.fields)
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise InvalidRequest("'purpose' is required.", param="purpose")
    if purpose != UPLOAD:
        raise InvalidRequest(f"'purpose' may only be '{UPLOAD}' here.", param="purpose")
    anchor = fields.pop("expires_after[anchor]", None)
    seconds = fields.pop("expires_after[seconds]", None)
    for name in fields:
        service.unknown.note(name)
    made = store.now
    lifetime = None
    if anchor is not None or seconds is not None:
        given = {"anchor": anchor, "seconds": _whole(seconds)}
        lifetime = lifetime_of(given, "expires_after")
    return StoredFile(
        id=upload.id,
        owner=owner,
        bytes=upload.size,
        made=made,
        filename=upload.filename,
        purpose=purpose,
        expires_at=None if lifetime is None else made // 10**9 + lifetime,
    )


def _whole(text: str | None) -> int | None:
    """The number that a text is, or None."""
    plain = text is not None and text.isascii() and text.isdecimal() and len(text) < 12
    return int(text) if text is not None and plain else None


def lifetime_of(given: Any, param: str) -> int:
    """Seconds from `expires_after` or its like. Raises InvalidRequest that names the part."""
    if not isinstance(given, Mapping) or given.get("anchor") != "created_at":
        raise InvalidRequest(f"'{param}' needs the anchor 'created_at'.", param=f"{param}[anchor]")
    seconds = given.get("seconds")
    if type(seconds) is not int or not SHORTEST <= seconds <= LONGEST:
        raise InvalidRequest(
            f"'{param}' needs seconds from {SHORTEST} to {LONGEST}.", param=f"{param}[seconds]"
        )
    return seconds


async def list_files(request: Request, service: Service) -> Response:
    """List the caller's files, the newest first unless `order` says asc."""
    files = store_of(service).files_of(owner(request))
    query = request.query_params
    purpose = query.get("purpose")
    if purpose is not None:
        if purpose not in PURPOSES:
            raise InvalidRequest(f"'purpose' may be {' or '.join(PURPOSES)} here.", param="purpose")
        files = [file for file in files if file.purpose == purpose]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' may be asc or desc.", param="order")
    if order == "desc":
        files.reverse()
    limit = limit_of(query, MOST_FILES, MOST_FILES)
    return reply(page(files, query.get("after"), limit, file_json))


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """`limit` of a query, from 1 to `most`. Raises InvalidRequest."""
    if "limit" not in query:
        return default
    limit = _whole(query["limit"])
    if limit is None or not 1 <= limit <= most:
        raise InvalidRequest(f"'limit' must be from 1 to {most}.", param="limit")
    return limit


def page(items: Sequence[Item], after: str | None, limit: int, json: Any) -> dict[str, Any]:
    """One page of a list, of what comes behind the id `after`. Raises InvalidRequest."""
    first = 0
    if after is not None:
        places = [i for i, item in enumerate(items) if item.id == after]
        if not places:
            raise InvalidRequest("'after' is the id of nothing in this list.", param="after")
        first = places[0] + 1
    shown = items[first : first + limit]
    return {
        "object": "list",
        "data": [json(item) for item in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": first + limit < len(items),
    }


async def retrieve_file(request: Request, service: Service) -> Response:
    """Describe one file."""
    return reply(file_json(_asked(request, service)))


async def file_content(request: Request, service: Service) -> Response:
    """Send a file's bytes."""
    file = _asked(request, service)
    return FileResponse(
        store_of(service).path(file.id),
        media_type="application/octet-stream",
        headers={"x-content-type-options": "nosniff", "cache-control": "no-store"},
    )


async def delete_file(request: Request, service: Service) -> Response:
    """Delete a file that no batch needs any more."""
    store, file = store_of(service), _asked(request, service)
    await asyncio.to_thread(store.delete, file)
    return reply({"id": file.id, "object": "file", "deleted": True})


def _asked(request: Request, service: Service) -> StoredFile:
    return store_of(service).get(request.path_params["id"], owner(request))
