"""From a plan's plain numbers to the tensors that the layers need for one pass.

Owns: index tensors and masks of a decode step and of a sweep's segment, for each group of layers
(`kv_cache.groups`). Does not own: which rows there are (`scheduler.plan`) or the KV memory itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from moestro.engine.rotary import Rotary
from moestro.kv_cache.spec import LayerMemory
from moestro.scheduler.plan import DecodePlan, DecodeRow, SweepRow

# Rows of one step attend together, padded to the longest of them. When padding would read more
# tokens than this for nothing, rows are split by length: reading about half as many takes as long
# as the calls for one more group.
PAD_LIMIT = 2048

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend in one call. `rows` is None when they are all rows."""

    rows: torch.Tensor | None
    table: torch.Tensor  # [rows, n], KV rows of layer 0; of windowed layers only what is seen
    visible: torch.Tensor  # bool [rows, 1, 1, n * block_size]


@dataclass(frozen=True, slots=True)
class Paged:
    """All rows for a kernel that reads the KV pool itself."""

    table: torch.Tensor  # [B, n], KV rows of layer 0; of windowed layers only what is seen
    first: torch.Tensor  # [B], tokens seen, both included, counted from the table's first one
    last: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The tensors of one decode step over B rows, for one group of layers."""

    ids: tuple[str, ...]
    tokens: torch.Tensor  # [B]
    places: torch.Tensor  # [B], where each row's new KV goes, as in `LayerKV.write`
    cos: torch.Tensor
    sin: torch.Tensor
    groups: tuple[AttentionGroup, ...]  # empty with `paged`
    paged: Paged | None


class DecodeBuilder:
    """Builds decode steps; remembers block tables that have not changed since the last one."""

    def __init__(
        self,
        block_size: int,
        layers: int,
        rotary: Rotary,
        kinds: Sequence[LayerMemory],
        paged: bool,
    ) -> None:
        """`layers` of a block; `kinds`: the memory of each group of layers; `paged`: a kernel
        reads the pool itself."""
        self._size = block_size
        self._layers = layers
        self._rotary = rotary
        self._kinds = kinds
        self._paged = paged
        self._tables: list[dict[str, tuple[tuple[int, ...], Ints]]] = [{} for _ in kinds]

    def build(self, plan: DecodePlan) -> tuple[DecodeStep, ...]:
        """The step for these rows, as each group of layers sees it."""
        rows = plan.rows
        ids = tuple(row.id for row in rows)
        tokens = torch.tensor([row.token for row in rows])
        positions = np.array([row.position for row in rows], dtype=np.int64)
        cos, sin = self._rotary.tables(torch.from_numpy(positions))
        steps = []
        for group, kind in enumerate(self._kinds):
            tables = [self._table(row, group) for row in rows]
            own = np.array([t[p] for t, p in zip(tables, positions // self._size, strict=True)])
            places = torch.from_numpy(own * self._size + positions % self._size)
            groups, paged = self._attention(tables, positions, kind)
            steps.append(DecodeStep(ids, tokens, places, cos, sin, groups, paged))
        return tuple(steps)

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        for known in self._tables:
            known.pop(id, None)

    def _table(self, row: DecodeRow, group: int) -> Ints:
        blocks = row.further[group - 1] if group else row.blocks
        known = self._tables[group].get(row.id)
        if known is not None and known[0] is blocks:
            return known[1]
        table = np.array(blocks, dtype=np.int64) * self._layers
        self._tables[group][row.id] = (blocks, table)
        return table

    def _attention(
        self, tables: list[Ints], positions: Ints, kind: LayerMemory
    ) -> tuple[tuple[AttentionGroup, ...], Paged | None]:
        """Tables and masks from the first block on that each row sees."""
        first, last = np.zeros_like(positions), positions
        if not kind.keeps_all:
            first = np.array([kind.seen_from(at) for at in positions.tolist()])
            skipped = first // self._size
            tables = [table[n:] for table, n in zip(tables, skipped.tolist(), strict=True)]
            first, last = first - skipped * self._size, last - skipped * self._size
        if self._paged:
            table = torch.from_numpy(self._padded(tables, last))
            return (), Paged(table, torch.from_numpy(first), torch.from_numpy(last))
        parts = _split_by_length(last)
        return tuple(self._group(tables, first, last, part) for part in parts), None

    def _group(
        self, tables: list[Ints], first: Ints, last: Ints, part: Ints | None
    ) -> AttentionGroup:
        if part is not None:
            tables, first, last = [tables[i] for i in part], first[part], last[part]
        table = self._padded(tables, last)
        at = np.arange(table.shape[1] * self._size)[None, :]
        visible = (at <= last[:, None]) & (at >= first[:, None])
        return AttentionGroup(
            rows=None if part is None else torch.from_numpy(part),
            table=torch.from_numpy(table),
            visible=torch.from_numpy(visible)[:, None, None],
        )

    def _padded(self, tables: list[Ints], last: Ints) -> Ints:
        """Tables [rows, n] wide enough for the last token of each."""
        width = int(last.max()) // self._size + 1
        padded = np.zeros((len(tables), width), dtype=np.int64)
        for line, table in zip(padded, tables, strict=True):
            used = table[:width]
            line[: len(used)] = used
        return padded


def _split_by_length(last: Ints) -> list[Ints | None]:
    """Row indices that attend together; [None] when all rows do."""
    longest = int(last.max()) + 1
    if longest * len(last) - int((last + 1).sum()) <= PAD_LIMIT:
        return [None]
    bucket = np.ceil(np.log2(last + 1.0) / 2)  # lengths within a factor of 4
    return [np.flatnonzero(bucket == b) for b in np.unique(bucket)]


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Where a segment's KV is, for one group of layers."""

    table: torch.Tensor  # [blocks], KV rows of layer 0, from the block that has `first` on
    first: int  # position of the table's first token
    places: torch.Tensor  # [tokens], where each token's KV goes, as in `LayerKV.write`


@dataclass(slots=True)
class Segment:
    """One sequence's run of prompt tokens inside a sweep. `alive` turns False when it is dropped,
    and from then on it must not write KV: its blocks may belong to somebody else."""

    row: SweepRow
    tables: tuple[SegmentTable, ...]  # one for each group of layers
    cos: torch.Tensor
    sin: torch.Tensor
    alive: bool = True
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def length(self) -> int:
        """Tokens to compute."""
        return len(self.row.tokens)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.row.start + len(self.row.tokens)


def build_segment(
    row: SweepRow, block_size: int, layers: int, rotary: Rotary, kinds: Sequence[LayerMemory]
) -> Segment:
    """The tensors of one row of a sweep, where blocks have `layers` layers."""
    end = row.start + len(row.tokens)
    positions = torch.arange(row.start, end)
    tables = []
    for kind, blocks in zip(kinds, (row.blocks, *row.further), strict=True):
        table = torch.tensor(blocks, dtype=torch.int64) * layers
        places = table[positions // block_size] * block_size + positions % block_size
        first = kind.seen_from(row.start) // block_size
        seen = table[first : -(-end // block_size)]
        tables.append(SegmentTable(seen, first * block_size, places))
    cos, sin = rotary.tables(positions)
    return Segment(
        row=row,
        tables=tuple(tables),
        cos=cos,
        sin=sin,
        tokens=torch.tensor(row.tokens, dtype=torch.int64),
    )


def cat_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along rows without a copy when there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
