"""Decode steps as tensors: every row attends to its own tokens, however rows are grouped."""

from __future__ import annotations

import pytest
import torch

from moestro.engine.batch import DecodeBuilder
from moestro.engine.rotary import Rotary
from moestro.kv_cache.prefix import GONE
from moestro.kv_cache.spec import LayerMemory, PagedKV, WindowKV
from moestro.scheduler.plan import DecodePlan, DecodeRow

SIZE, LAYERS = 4, 3


def plan(positions: list[int]) -> DecodePlan:
    """Row i holds blocks 1000 * i, 1000 * i + 1, ..."""
    return DecodePlan(
        tuple(
            DecodeRow(str(i), 7, at, tuple(1000 * i + b for b in range(at // SIZE + 1)), 0)
            for i, at in enumerate(positions)
        )
    )


FULL, WINDOW = PagedKV(1, 1, 1, 4, SIZE), WindowKV(1, 1, 1, 4, SIZE, window=6)


def builder(*kinds: LayerMemory, paged: bool = False) -> DecodeBuilder:
    return DecodeBuilder(SIZE, LAYERS, Rotary(torch.ones(4)), kinds, paged)


@pytest.mark.parametrize(
    ("positions", "groups"), [([0], 1), ([3, 9, 5], 1), ([3, 2900, 2, 2700], 2), ([0, 9000, 40], 3)]
)
def test_groups_cover_each_row_once_and_see_its_tokens_only(
    positions: list[int], groups: int
) -> None:
    (step,) = builder(FULL).build(plan(positions))
    assert len(step.groups) == groups
    seen: list[int] = []
    for group in step.groups:
        rows = range(len(positions)) if group.rows is None else group.rows.tolist()
        seen += rows
        for line, row in enumerate(rows):
            visible = group.visible[line].flatten().nonzero().flatten().tolist()
            last = positions[row]
            assert visible == list(range(last + 1))
            blocks = group.table[line, : last // SIZE + 1]
            assert blocks.tolist() == [(1000 * row + b) * LAYERS for b in range(last // SIZE + 1)]
    assert sorted(seen) == list(range(len(positions)))
    for row, at in enumerate(positions):
        place = (1000 * row + at // SIZE) * LAYERS * SIZE + at % SIZE
        assert int(step.places[row]) == place


def test_a_table_that_grew_is_not_remembered_as_it_was() -> None:
    remembers = builder(FULL)
    remembers.build(plan([3]))
    (grown,) = remembers.build(plan([4]))
    assert grown.groups[0].table.tolist() == [[0, LAYERS]]
    remembers.forget("0")
    moved = DecodePlan((DecodeRow("0", 7, 4, (5, 6), 0),))
    assert remembers.build(moved)[0].groups[0].table.tolist() == [[5 * LAYERS, 6 * LAYERS]]


def test_windowed_layers_see_only_blocks_of_the_window() -> None:
    """Position 9 sees 4 .. 9 in blocks 1 and 2, which are other ones for those layers."""
    row = DecodeRow("0", 7, 9, (5, 6, 7), 0, further=((GONE, 8, 9),))
    for paged in (False, True):
        full, window = builder(FULL, WINDOW, paged=paged).build(DecodePlan((row,)))
        assert full.places.tolist() == [7 * LAYERS * SIZE + 1]
        assert window.places.tolist() == [9 * LAYERS * SIZE + 1]
        if paged:
            assert window.paged is not None
            assert window.paged.table.tolist() == [[8 * LAYERS, 9 * LAYERS]]
            assert (window.paged.first.tolist(), window.paged.last.tolist()) == ([0], [5])
        else:
            assert window.groups[0].table.tolist() == [[8 * LAYERS, 9 * LAYERS]]
            assert window.groups[0].visible.flatten().tolist() == [True] * 6 + [False] * 2


def test_a_paged_step_names_blocks_and_first_and_last_position() -> None:
    positions = [3, 2900, 0]
    (step,) = builder(FULL, paged=True).build(plan(positions))
    assert step.paged is not None
    assert not step.groups
    assert step.paged.last.tolist() == positions
    assert step.paged.first.tolist() == [0, 0, 0]
    for row, at in enumerate(positions):
        blocks = [(1000 * row + b) * LAYERS for b in range(at // SIZE + 1)]
        assert step.paged.table[row, : len(blocks)].tolist() == blocks
