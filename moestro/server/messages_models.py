"""The list of models as Anthropic's clients read it. Owns: its entries and its pages.

Which requests get it: those with an `anthropic-version` header (`messages_problems`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import QueryParams

from moestro.errors import InvalidRequest
from moestro.server.service import Service

USUAL, MOST = 20, 1000  # entries of a page
STAGES = ("lifecycle", "lifecycle[]")  # of a model's life; every one here is active


def entry(service: Service, name: str) -> dict[str, Any]:
    """Return one model."""
    info = service.engine.info
    longest = None if info is None else info.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
        "capabilities": None,
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
    }


def page(service: Service, query: QueryParams) -> dict[str, Any]:
    """Return the part of the list that a query asks for. Raises `InvalidRequest`."""
    names = list(service.settings.served_model_names)
    stages = [stage for key in STAGES for stage in query.getlist(key)]
    if stages and "active" not in stages:
        names = []
    limit = _limit(query.get("limit"))
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidRequest("'after_id' and 'before_id' exclude each other.", param="before_id")
    if before is not None:
        names = names[: _place(names, before, "before_id")]
        shown = names[-limit:]
    else:
        names = names if after is None else names[_place(names, after, "after_id") + 1 :]
        shown = names[:limit]
    return {
        "data": [entry(service, name) for name in shown],
        "has_more": len(shown) < len(names),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def _limit(value: str | None) -> int:
    if value is None:
        return USUAL
    if not (value.isascii() and value.isdigit()) or not 1 <= int(value[:9]) <= MOST:
        raise InvalidRequest(f"'limit' must be a whole number from 1 to {MOST}.", param="limit")
    return int(value)


def _place(names: list[str], id: str, param: str) -> int:
    if id not in names:
        raise InvalidRequest(f"'{param}' names no model of this list.", param=param)
    return names.index(id)
