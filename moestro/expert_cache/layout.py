"""One expert as one contiguous blob, and where its bytes lie in the checkpoint.

Owns: offsets inside a blob and byte ranges of files. Does not own: reading them
(`expert_cache.store`) or computing with them (`kernels`). No torch: dtypes are names.
"""

from __future__ import annotations

from dataclasses import dataclass

from moestro.kernels.formats import FIELD_BYTES, Format

ALIGN = 256  # bytes; a blob and each part in it start on this boundary

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """An array inside a blob. `offset` is in bytes from the start of the blob."""

    # "gate_up" or "down"; of a packed layout one of their fields: "down.scales"; "down_bias"
    name: str
    shape: tuple[int, int]  # [out, in], row-major
    offset: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes, without what is left empty behind it."""
        return self.shape[0] * self.shape[1] * FIELD_BYTES[self.dtype]

    def rows(self, lo: int, hi: int) -> tuple[int, int]:
        """Element range of rows lo..hi counted from the start of the part."""
        return lo * self.shape[1], hi * self.shape[1]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The blob of every expert of a model: [gate; up] of [2I, H], then down of [H, I], then, where
    experts have them, a bias of each: [2I, 1] and [H, 1]."""

    hidden: int
    intermediate: int
    dtype: str  # computed in; and of the matrices in host arena and slots, unless these are packed
    parts: tuple[Part, ...]
    nbytes: int  # of one blob, a multiple of ALIGN
    format: Format | None = None  # of the matrices when they are packed

    def part(self, name: str) -> Part:
        """The part called `name`; KeyError if there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    def start(self, matrix: str) -> int:
        """Byte of a blob at which gate_up or down starts, packed or not."""
        return self.part(f"{matrix}.codes" if self.format else matrix).offset

    @property
    def has_bias(self) -> bool:
        """Whether experts have biases, which are in `dtype` whatever the matrices are in."""
        return any(part.name == "down_bias" for part in self.parts)


def gated_layout(hidden: int, intermediate: int, dtype: str, *, bias: bool = False) -> ExpertLayout:
    """Layout of a gated MLP expert (gate, up, down) in an unquantised dtype."""
    parts = []
    offset = 0
    for name, shape in (("gate_up", (2 * intermediate, hidden)), ("down", (hidden, intermediate))):
        parts.append(Part(name, shape, offset, dtype))
        offset += -(-parts[-1].nbytes // ALIGN) * ALIGN
    offset = _add_biases(parts, offset, hidden, intermediate, dtype if bias else None)
    return ExpertLayout(hidden, intermediate, dtype, tuple(parts), offset)


def packed_layout(
    hidden: int, intermediate: int, dtype: str, format: Format, *, bias: bool = False
) -> ExpertLayout:
    """The same with matrices in `format`: gate and up as a stack of two, then down."""
    parts = []
    offset = 0
    for name, (n, k), stack in (
        ("gate_up", (intermediate, hidden), 2),
        ("down", (hidden, intermediate), 1),
    ):
        for field in format.fields(n, k, stack):
            at = offset + field.offset
            parts.append(Part(f"{name}.{field.name}", field.shape, at, field.dtype))
        offset += -(-format.nbytes(n, k, stack) // ALIGN) * ALIGN
    offset = _add_biases(parts, offset, hidden, intermediate, dtype if bias else None)
    return ExpertLayout(hidden, intermediate, dtype, tuple(parts), offset, format)


def _add_biases(
    parts: list[Part], offset: int, hidden: int, intermediate: int, dtype: str | None
) -> int:
    """Put biases behind what is there, unless `dtype` is None; returns where they end."""
    if dtype is not None:
        for name, rows in (("gate_up_bias", 2 * intermediate), ("down_bias", hidden)):
            parts.append(Part(name, (rows, 1), offset, dtype))
            offset += -(-parts[-1].nbytes // ALIGN) * ALIGN
    return offset


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
    repack: str = ""  # how else the file's bytes become those of the rows: see `repack.REPACK`


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """Where one expert's bytes come from; its extents together fill the whole blob."""

    layer: int  # index among the MoE layers, 0-based
    expert: int
    extents: tuple[Extent, ...]
