"""A share of misses for the CPU that does not depend on how fast anything is."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.expert_cache.cpu_split import CpuSplit


def fix_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU compute half of a layer's misses, rounded up, from the next engine on."""

    def learn(self: CpuSplit, *_: object) -> None:
        self.share = (np.arange(len(self.share)) + 1) // 2

    monkeypatch.setattr(CpuSplit, "_update", learn)
