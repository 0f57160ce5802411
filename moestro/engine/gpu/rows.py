"""Which row of the device's block tables each running sequence has.

Owns: that a step's rows are always the first ones, without gaps, whoever leaves; and what must be
uploaded for it. Does not own: blocks (`kv_cache.manager`) or the tables themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moestro.scheduler.plan import DecodeRow


@dataclass(slots=True)
class Seat:
    """A row, and what the device knows of the sequence in it."""

    number: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seating:
    """Where each row of a plan sits, in the plan's order."""

    seats: list[int]
    rewritten: list[int]  # indices into the plan: the whole table row has to be uploaded
    grown: list[int]  # indices into the plan: just the last block is new


class RowTable:
    """Seats sequences. Whoever keeps its place keeps its row, so that little is uploaded."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}

    def seat_of(self, id: str) -> int | None:
        """The row that a sequence had in the last step."""
        seat = self._seats.get(id)
        return None if seat is None else seat.number

    def preview(self, rows: Sequence[DecodeRow]) -> list[int]:
        """The rows that `seat` would give, without giving them."""
        stay = {row.id: self._seats[row.id].number for row in rows if row.id in self._seats}
        stay = {id: number for id, number in stay.items() if number < len(rows)}
        taken = set(stay.values())
        free = iter([number for number in range(len(rows)) if number not in taken])
        return [stay[row.id] if row.id in stay else next(free) for row in rows]

    def seat(self, rows: Sequence[DecodeRow]) -> Seating:
        """Seat exactly these sequences in rows 0 .. len(rows) - 1."""
        before = self._seats
        stay = {
            row.id: before[row.id]
            for row in rows
            if row.id in before and before[row.id].number < len(rows)
        }
        taken = {seat.number for seat in stay.values()}
        free = iter([number for number in range(len(rows)) if number not in taken])
        seating = Seating([], [], [])
        for index, row in enumerate(rows):
            seat = stay.get(row.id)
            if seat is None:
                seat = stay[row.id] = Seat(next(free), row.blocks)
                seating.rewritten.append(index)
            elif seat.blocks is not row.blocks:
                if row.blocks[:-1] == seat.blocks:
                    seating.grown.append(index)
                elif row.blocks != seat.blocks:
                    seating.rewritten.append(index)
                seat.blocks = row.blocks
            seating.seats.append(seat.number)
        self._seats = stay
        return seating
