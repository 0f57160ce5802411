"""What a device did in one step, repeated at once, is what it did one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moestro.expert_cache.slot_table import FREE, SlotTable

LAYERS, EXPERTS, SLOTS = 3, 4, 5
KEYS = LAYERS * EXPERTS


@given(st.lists(st.lists(st.integers(0, KEYS - 1), unique=True, max_size=8), max_size=6), st.data())
def test_replace_is_the_sum_of_its_parts(steps: list[list[int]], data: st.DataObject) -> None:
    table = SlotTable(LAYERS, EXPERTS, SLOTS, 0)
    owner: dict[int, int] = {}
    for wanted in steps:
        held, keys, slots = set(owner.values()), [], []
        for key in wanted:
            if key not in owner.values():  # it may have been a moment ago
                keys.append(key)
                slots.append(data.draw(st.integers(0, SLOTS - 1)))
                owner[slots[-1]] = key
        gone = table.replace(np.array(keys, np.int64), np.array(slots, np.int64))
        assert set(gone.tolist()) == (held | set(keys)) - set(owner.values())
        for slot in range(SLOTS):
            assert table.owner[slot] == owner.get(slot, FREE)
        table.check()
        assert table.free == SLOTS - len(owner)
