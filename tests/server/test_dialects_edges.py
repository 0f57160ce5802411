"""Every value of a rich request replaced by odd ones: answered or refused, never a failure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Make
from tests.server.test_messages import HISTORY as BLOCKS
from tests.server.test_messages import TOOL as NAMED
from tests.server.test_responses import HISTORY as ITEMS
from tests.server.test_responses import TOOL as FLAT
from tests.server.test_tools import QWEN

ODD: list[Any] = [None, True, -1, 1.5, "", "x", [], {}, [None], [[]], {"type": 5}, {"type": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": ITEMS,
        "instructions": "S",
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "tools": [FLAT],
        "tool_choice": "auto",
    },
    "/v1/messages": {
        "messages": BLOCKS,
        "system": [{"type": "text", "text": "S"}],
        "max_tokens": 5,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "low"},
        "stop_sequences": ["END"],
        "tools": [NAMED],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    },
}
BODIES["/v1/messages/count_tokens"] = {
    key: BODIES["/v1/messages"][key] for key in ("messages", "system", "tools", "tool_choice")
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value inside `value` is."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, found in inner:
        yield (*path, key)
        if isinstance(found, dict | list):
            yield from places(found, (*path, key))


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


@pytest.mark.parametrize("path", BODIES)
async def test_odd_values_are_answered_or_refused(make: Make, path: str) -> None:
    async with make("x", template=QWEN, engine={"per_step": 100}) as server:
        assert (await server.post(path, BODIES[path])).status_code == 200
        for place in places(BODIES[path]):
            for odd in ODD:
                response = await server.post(path, replaced(BODIES[path], place, odd))
                assert response.status_code in (200, 400, 404), (place, odd, response.text)
                if response.status_code != 200:
                    assert response.json()["error"]["message"]
