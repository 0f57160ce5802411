"""The GPU's own way through the engine while experts come, and without locked memory.

Triton's interpreter stands in for the GPU, as in `test_gpu_path`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from moestro.engine.gpu import build as gpu_build
from moestro.expert_cache import fill
from moestro.expert_cache.device_cache import DeviceCache
from moestro.expert_cache.locked_ring import LockedRing
from tests.engine.test_gpu_path import NAME, Checkpoints, Goldens, _interpreted, settings
from tests.expert_cache.test_page_lock import FakeLocker
from tests.models.test_parity import blob, experts
from tests.oracle import drive
from tests.oracle.specs import SPECS

__all__ = ["_interpreted"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_text_is_right_while_experts_come_to_a_slot_each(
    checkpoint: Checkpoints, golden: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "BESIDE_WORK", 1)  # or all might be there before the request
    monkeypatch.setattr(fill, "ALONE", 1)
    case = min(golden(NAME).cases, key=lambda case: len(case.prompt))
    with drive.engine(checkpoint(NAME), filled=False, **settings(expert_slots=None)) as engine:
        assert engine.stats().experts.fill.resident < experts(SPECS[NAME])
        found = drive.generate(engine, [drive.greedy("a", case.prompt, 2)])["a"]
        assert tuple(found.tokens) == case.tokens[:2]
        engine.finish_fill()
        engine._cache.check(verify_bytes=True)  # type: ignore[call-arg]
        assert engine.stats().experts.slots.resident == experts(SPECS[NAME])


def test_under_a_low_limit_on_locked_memory_misses_go_through_the_ring(
    checkpoint: Checkpoints, golden: Goldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = LockedRing.send

    def spy(ring: LockedRing, pairs: Any) -> None:
        sent.append(len(pairs))
        send(ring, pairs)

    monkeypatch.setattr(LockedRing, "send", spy)
    monkeypatch.setattr(gpu_build, "DeviceCache", partial(DeviceCache, locker=FakeLocker(fails=2)))
    case = min(golden(NAME).cases, key=lambda case: len(case.prompt))
    host = experts(SPECS[NAME]) // 2 * blob(SPECS[NAME])
    with drive.engine(checkpoint(NAME), filled=False, **settings(host_memory=host)) as engine:
        found = drive.generate(engine, [drive.greedy("a", case.prompt, 3)])["a"]
        assert tuple(found.tokens) == case.tokens[:3]
        engine.finish_fill()
        assert sum(sent) >= engine.stats().experts.slots.resident > 0
        assert engine.stats().experts.fill.locked_bytes == 0
        engine._cache.check(verify_bytes=True)  # type: ignore[call-arg]
