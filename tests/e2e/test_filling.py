"""A server answers first and fills its memory then: statistics and log say how far that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.oracle.serving import serve


def test_memory_fills_by_itself_and_can_be_watched(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serve("", log=log) as served:
        seen: list[dict[str, Any]] = []

        def full(stats: dict[str, Any]) -> bool:
            seen.append(stats["experts"]["fill"])
            return not seen[-1]["active"]

        served.wait(full, "full")
        total = json.loads(served.get("/admin/stats")[1])["info"]["experts"]
        assert seen[-1] == {
            "active": False,
            "total": total,
            "resident": total,
            "failed": 0,
            "locked_bytes": 0,
        }
        assert f"{total} of {total} experts are in memory" in log.read_text()
