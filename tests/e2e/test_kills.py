"""A few kills at random moments, as `benchmarks.kills` does by the dozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kills
from tests.oracle.serving import serve


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_is_lost_repeated_or_different(tmp_path: Path) -> None:
    with serve("", "--engine-restarts", "100", log=tmp_path / "log") as served:
        found = await kills.measure(served, 3, seed=5, tokens=40)
        assert found.wrong == []
        assert found.kills == 3
        assert found.compared >= 32
        assert len(found.every) == len(found.first) > 0
        assert served.health() == {"status": "ok"}
