"""From a plan's plain numbers to the tensors that the layers need for one pass.

Owns: index tensors and masks of a decode step and of a sweep's segment. Does not own: which
rows there are (`scheduler.plan`) or the KV memory itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from moestro.engine.rotary import Rotary
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
    table: torch.Tensor  # [rows, n], KV rows of layer 0
    visible: torch.Tensor  # bool [rows, 1, 1, n * block_size]


@dataclass(frozen=True, slots=True)
class Paged:
    """All rows for a kernel that reads the KV pool itself."""

    table: torch.Tensor  # [B, n], KV rows of layer 0
    first: torch.Tensor  # [B], positions seen, both included
    last: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The tensors of one decode step over B rows."""

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
        window: int | None,
        paged: bool,
    ) -> None:
        self._size = block_size
        self._layers = layers
        self._rotary = rotary
        self._window = window
        self._paged = paged
        self._tables: dict[str, tuple[tuple[int, ...], Ints]] = {}

    def build(self, plan: DecodePlan) -> DecodeStep:
        """The step for these rows."""
        rows = plan.rows
        positions = np.array([row.position for row in rows], dtype=np.int64)
        tables = [self._table(row) for row in rows]
        own = np.array([t[p] for t, p in zip(tables, positions // self._size, strict=True)])
        cos, sin = self._rotary.tables(torch.from_numpy(positions))
        parts = [] if self._paged else _split_by_length(positions)
        return DecodeStep(
            ids=tuple(row.id for row in rows),
            tokens=torch.tensor([row.token for row in rows]),
            places=torch.from_numpy(own * self._size + positions % self._size),
            cos=cos,
            sin=sin,
            groups=tuple(self._group(tables, positions, part) for part in parts),
            paged=self._page(tables, positions) if self._paged else None,
        )

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._tables.pop(id, None)

    def _table(self, row: DecodeRow) -> Ints:
        known = self._tables.get(row.id)
        if known is not None and known[0] is row.blocks:
            return known[1]
        table = np.array(row.blocks, dtype=np.int64) * self._layers
        self._tables[row.id] = (row.blocks, table)
        return table

    def _group(self, tables: list[Ints], positions: Ints, part: Ints | None) -> AttentionGroup:
        mine = positions if part is None else positions[part]
        table = self._padded(
            [tables[i] for i in (range(len(tables)) if part is None else part)], mine
        )
        at = np.arange(table.shape[1] * self._size)[None, :]
        visible = at <= mine[:, None]
        if self._window is not None:
            visible &= at > mine[:, None] - self._window
        return AttentionGroup(
            rows=None if part is None else torch.from_numpy(part),
            table=torch.from_numpy(table),
            visible=torch.from_numpy(visible)[:, None, None],
        )

    def _page(self, tables: list[Ints], positions: Ints) -> Paged:
        first = np.zeros_like(positions)
        if self._window is not None:
            first = np.maximum(first, positions - self._window + 1)
        table = torch.from_numpy(self._padded(tables, positions))
        return Paged(table, torch.from_numpy(first), torch.from_numpy(positions))

    def _padded(self, tables: list[Ints], positions: Ints) -> Ints:
        """Tables [rows, n] wide enough for the last of these positions."""
        width = int(positions.max()) // self._size + 1
        padded = np.zeros((len(tables), width), dtype=np.int64)
        for line, table in zip(padded, tables, strict=True):
            used = table[:width]
            line[: len(used)] = used
        return padded


def _split_by_length(positions: Ints) -> list[Ints | None]:
    """Row indices that attend together; [None] when all rows do."""
    longest = int(positions.max()) + 1
    if longest * len(positions) - int((positions + 1).sum()) <= PAD_LIMIT:
        return [None]
    bucket = np.ceil(np.log2(positions + 1.0) / 2)  # lengths within a factor of 4
    return [np.flatnonzero(bucket == b) for b in np.unique(bucket)]


@dataclass(slots=True)
class Segment:
    """One sequence's run of prompt tokens inside a sweep. `alive` turns False when it is dropped,
    and from then on it must not write KV: its blocks may belong to somebody else."""

    row: SweepRow
    table: torch.Tensor  # [blocks], KV rows of layer 0
    places: torch.Tensor  # [tokens], where each token's KV goes, as in `LayerKV.write`
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


def build_segment(row: SweepRow, block_size: int, layers: int, rotary: Rotary) -> Segment:
    """The tensors of one row of a sweep."""
    positions = torch.arange(row.start, row.start + len(row.tokens))
    table = torch.tensor(row.blocks, dtype=torch.int64) * layers
    cos, sin = rotary.tables(positions)
    return Segment(
        row=row,
        table=table[: -(-(row.start + len(row.tokens)) // block_size)],
        places=table[positions // block_size] * block_size + positions % block_size,
        cos=cos,
        sin=sin,
        tokens=torch.tensor(row.tokens, dtype=torch.int64),
    )


def cat_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along rows without a copy when there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
