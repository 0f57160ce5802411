"""One expert as one contiguous blob, and where its bytes lie in the checkpoint.

Owns: offsets inside a blob and byte ranges of files. Does not own: reading them
(`expert_cache.store`) or computing with them (`kernels`). No torch: dtypes are names.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGN = 256  # bytes; a blob and each part in it start on this boundary

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix inside a blob. `offset` is in bytes from the start of the blob."""

    name: str  # "gate_up" or "down"
    shape: tuple[int, int]  # [out, in], row-major
    offset: int

    def rows(self, lo: int, hi: int) -> tuple[int, int]:
        """Element range of rows lo..hi counted from the start of the part."""
        return lo * self.shape[1], hi * self.shape[1]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The blob of every expert of a model: [gate; up] of [2I, H], then down of [H, I]."""

    hidden: int
    intermediate: int
    dtype: str  # name of the dtype in host arena and slots
    parts: tuple[Part, ...]
    nbytes: int  # of one blob, a multiple of ALIGN

    def part(self, name: str) -> Part:
        """The part called `name`; KeyError if there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)


def gated_layout(hidden: int, intermediate: int, dtype: str) -> ExpertLayout:
    """Layout of a gated MLP expert (gate, up, down) in an unquantised dtype."""
    size = DTYPE_BYTES[dtype]
    parts = []
    offset = 0
    for name, shape in (("gate_up", (2 * intermediate, hidden)), ("down", (hidden, intermediate))):
        parts.append(Part(name, shape, offset))
        offset += -(-shape[0] * shape[1] * size // ALIGN) * ALIGN
    return ExpertLayout(hidden, intermediate, dtype, tuple(parts), offset)


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous byte range of a file that fills rows of one part of a blob."""

    path: str
    offset: int  # absolute, in bytes
    nbytes: int
    dtype: str  # of the file's elements
    part: str
    row: int  # first row of the part that this range fills
    rows: int
    transposed: bool = False  # the file has these rows as columns


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """Where one expert's bytes come from; its extents together fill the whole blob."""

    layer: int  # index among the MoE layers, 0-based
    expert: int
    extents: tuple[Extent, ...]
