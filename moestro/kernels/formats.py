"""How quantised matrices lie in memory, as data.

Owns: what a format's codes mean, which elements share a scale, and where codes and scales of a
matrix lie. Does not own: reading a published checkpoint into this form (`expert_cache.repack`) or
computing with it (`kernels.packed`, `kernels.gpu.packed`). No torch: dtypes are names.

A matrix [N, K] is its codes, row by row with K contiguous, then its scales, then, where the format
has them, zero points and a factor. Two codes of 4 bits share a byte, the first in the low half.
An element is (code - zero point) * scale * factor. Matrices of one shape may be stacked: the codes
of all, then the scales of all, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

ALIGN = 16  # bytes; every field starts on this boundary

FIELD_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
}


class Code(Enum):
    """What a code stands for."""

    E4M3 = "float8_e4m3fn"  # 8 bits (arXiv 2209.05433)
    E2M1 = "float4_e2m1"  # 4 bits: 0, .5, 1, 1.5, 2, 3, 4, 6, then the same below zero
    INT4 = "uint4"  # 4 bits: 0 .. 15, of which the zero point is taken off


@dataclass(frozen=True, slots=True)
class Field:
    """One of the arrays that a packed matrix consists of."""

    name: str  # "codes", "scales", "zeros" or "factor"
    shape: tuple[int, int]
    dtype: str
    offset: int  # bytes from the start of the matrix

    @property
    def nbytes(self) -> int:
        """Bytes, without what is left empty behind it."""
        return self.shape[0] * self.shape[1] * FIELD_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is quantised. Every block of `rows` x `columns` elements has one scale."""

    name: str
    code: Code
    rows: int  # of a block; 0: all
    columns: int  # of a block; 0: all
    scale: str  # dtype of the scales
    # Zero points of 4 bits, one a scale. Those of rows 2i and 2i + 1 share a byte. Without them
    # INT4's zero is 8.
    zeros: bool = False
    factor: bool = False  # one more float32 factor for a whole matrix

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.code is Code.E4M3 else 4

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """Blocks of a matrix [n, k], down and across; those at the edges may be smaller."""
        return -(-n // (self.rows or n)), -(-k // (self.columns or k))

    def lacks(self, n: int, k: int) -> str | None:
        """Why a matrix [n, k] cannot be in this format; None when it can."""
        if self.bits == 4 and k % 2:
            return f"rows of {k} elements do not fill bytes of two codes"
        if self.zeros and n % 2:
            return f"{n} rows do not fill bytes of two zero points"
        return None

    def fields(self, n: int, k: int, stack: int = 1) -> tuple[Field, ...]:
        """Where everything of `stack` matrices [n, k] lies, each field behind the one before."""
        down, across = self.grid(n, k)
        shapes = [
            ("codes", (stack * n, k * self.bits // 8), "uint8"),
            ("scales", (stack * down, across), self.scale),
        ]
        if self.zeros:
            shapes.append(("zeros", (stack * n // 2, across), "uint8"))
        if self.factor:
            shapes.append(("factor", (stack, 1), "float32"))
        fields: list[Field] = []
        offset = 0
        for name, shape, dtype in shapes:
            fields.append(Field(name, shape, dtype, offset))
            offset = -(-(offset + fields[-1].nbytes) // ALIGN) * ALIGN
        return tuple(fields)

    def nbytes(self, n: int, k: int, stack: int = 1) -> int:
        """Bytes of `stack` matrices [n, k], a multiple of ALIGN."""
        last = self.fields(n, k, stack)[-1]
        return -(-(last.offset + last.nbytes) // ALIGN) * ALIGN


FP8 = Format("fp8", Code.E4M3, 128, 128, "float32")
MXFP4 = Format("mxfp4", Code.E2M1, 1, 32, "float8_e8m0fnu")
NVFP4 = Format("nvfp4", Code.E2M1, 1, 16, "float8_e4m3fn", factor=True)
INT4 = Format("int4", Code.INT4, 1, 32, "float16")

# What --expert-dtype quantises to.
LOSSY = {"fp8": FP8, "int4": INT4, "mxfp4": MXFP4}


def fp8(rows: int, columns: int, scale: str) -> Format:
    """FP8 with blocks of another size."""
    return replace(FP8, rows=rows, columns=columns, scale=scale)


def int4(group: int, scale: str, *, zeros: bool) -> Format:
    """INT4 with groups of `group` columns (0: one a row)."""
    return replace(INT4, columns=group, scale=scale, zeros=zeros)
