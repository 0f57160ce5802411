"""Decode steps as tensors: every row attends to its own tokens, however rows are grouped."""

from __future__ import annotations

import pytest
import torch

from moestro.engine.batch import DecodeBuilder
from moestro.engine.rotary import Rotary
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


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("positions", "groups"), [([0], 1), ([3, 9, 5], 1), ([3, 2900, 2, 2700], 2), ([0, 9000, 40], 3)]
)
def test_groups_cover_each_row_once_and_see_its_tokens_only(
    positions: list[int], groups: int, window: int | None
) -> None:
    builder = DecodeBuilder(SIZE, LAYERS, Rotary(torch.ones(4)), window, paged=False)
    step = builder.build(plan(positions))
    assert len(step.groups) == groups
    seen: list[int] = []
    for group in step.groups:
        rows = range(len(positions)) if group.rows is None else group.rows.tolist()
        seen += rows
        for line, row in enumerate(rows):
            visible = group.visible[line].flatten().nonzero().flatten().tolist()
            last = positions[row]
            first = 0 if window is None else max(0, last - window + 1)
            assert visible == list(range(first, last + 1))
            blocks = group.table[line, : last // SIZE + 1]
            assert blocks.tolist() == [(1000 * row + b) * LAYERS for b in range(last // SIZE + 1)]
    assert sorted(seen) == list(range(len(positions)))
    for row, at in enumerate(positions):
        place = (1000 * row + at // SIZE) * LAYERS * SIZE + at % SIZE
        assert int(step.places[row]) == place


def test_a_table_that_grew_is_not_remembered_as_it_was() -> None:
    builder = DecodeBuilder(SIZE, LAYERS, Rotary(torch.ones(4)), None, paged=False)
    builder.build(plan([3]))
    grown = builder.build(plan([4]))
    assert grown.groups[0].table.tolist() == [[0, LAYERS]]
    builder.forget("0")
    moved = DecodePlan((DecodeRow("0", 7, 4, (5, 6), 0),))
    assert builder.build(moved).groups[0].table.tolist() == [[5 * LAYERS, 6 * LAYERS]]


@pytest.mark.parametrize("window", [None, 6])
def test_a_paged_step_names_blocks_and_first_and_last_position(window: int | None) -> None:
    positions = [3, 2900, 0]
    builder = DecodeBuilder(SIZE, LAYERS, Rotary(torch.ones(4)), window, paged=True)
    step = builder.build(plan(positions))
    assert step.paged is not None
    assert not step.groups
    assert step.paged.last.tolist() == positions
    first = [0, 0, 0] if window is None else [max(0, at - window + 1) for at in positions]
    assert step.paged.first.tolist() == first
    for row, at in enumerate(positions):
        blocks = [(1000 * row + b) * LAYERS for b in range(at // SIZE + 1)]
        assert step.paged.table[row, : len(blocks)].tolist() == blocks
