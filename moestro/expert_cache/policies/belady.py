"""The optimum, for traces only: it knows the future.

Owns: the best number of hits any policy could have. It may also refuse to keep a fetched expert,
and may drop one that was just used, so no decision `residency` could take beats it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

NEVER = 1 << 62


def optimal_hits(wanted: Sequence[Sequence[int]], slots: int) -> list[int]:
    """Hits of each step when every choice is the best one. `wanted` are distinct keys per step."""
    next_use = _next_uses(wanted)
    resident: dict[int, int] = {}  # key -> step of its next use
    farthest: list[tuple[int, int]] = []  # heap of (-next use, key), with stale entries
    hits = []
    for keys, nexts in zip(wanted, next_use, strict=True):
        held = [key in resident for key in keys]
        hits.append(sum(held))
        for key, following, hit in sorted(zip(keys, nexts, held, strict=True), key=_hits_first):
            if hit or len(resident) < slots or _displace(resident, farthest, following):
                resident[key] = following
                heapq.heappush(farthest, (-following, key))
    return hits


def _hits_first(item: tuple[int, int, Any]) -> bool:
    return not item[2]


def _displace(resident: dict[int, int], farthest: list[tuple[int, int]], following: int) -> bool:
    """Drop the resident used last of all, if that is later than `following`."""
    while farthest:
        negative, key = farthest[0]
        if resident.get(key) != -negative:
            heapq.heappop(farthest)  # stale
        elif -negative > following:
            heapq.heappop(farthest)
            del resident[key]
            return True
        else:
            return False
    return False


def _next_uses(wanted: Sequence[Sequence[int]]) -> list[list[int]]:
    seen: dict[int, int] = {}
    result = []
    for step in range(len(wanted) - 1, -1, -1):
        result.append([seen.get(key, NEVER) for key in wanted[step]])
        seen.update(dict.fromkeys(wanted[step], step))
    return result[::-1]
