"""Packed matrices inside kernels: from codes in memory to numbers in registers.

Owns: what a code means as instructions, how a tile of a packed matrix is read, and which formats
can be. Does not own: products (`packed_experts`, `packed_sweep`) or where fields lie
(`kernels.formats`).

A tile is [ROWS, GROUPS, CODES]: GROUPS runs of columns that have one scale each. Of two codes in a
byte the low one is of the column before, so a tile of 4-bit codes is two tiles, of even columns and
of odd ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moestro.kernels.formats import Code, Format

# Kinds of codes, and of scales.
E4M3, E2M1, INT4 = 0, 1, 2
FLOAT, E8M0 = 3, 4
_CODES = {Code.E4M3: E4M3, Code.E2M1: E2M1, Code.INT4: INT4}
_SCALES = {"float8_e8m0fnu": E8M0, "float8_e4m3fn": E4M3}
LEAST_GROUP = 16  # columns


def unsupported(form: Format) -> str | None:
    """Why these kernels cannot read matrices in `form`; None when they can."""
    group = form.columns
    if group and (group < LEAST_GROUP or group & (group - 1)):
        return f"groups of {group} columns, not a power of two from {LEAST_GROUP} on"
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Matrices [n, k] in `form`, `stack` of them, from byte `start` of each slot of a slab on."""

    form: Format
    n: int
    k: int
    start: int = 0
    stack: int = 1

    def arguments(self, slab: torch.Tensor) -> dict[str, Any]:
        """What a kernel needs to find them in `slab` uint8 [slots, nbytes]: pointers to the first
        slot's fields, and constants."""
        form, (_, across) = self.form, self.form.grid(self.n, self.k)
        found = {"codes": slab, "scales": slab, "zeros": slab, "factor": slab}
        for field in form.fields(self.n, self.k, self.stack):
            first = slab.view(-1)[self.start + field.offset :]
            kind = field.dtype if field.dtype not in _SCALES else "uint8"
            room = first.numel() // 4 * 4  # a whole number of elements
            found[field.name] = first[:room].view(getattr(torch, kind))
        return {
            **found,
            "STRIDE": slab.stride(0),
            "N": self.n,
            "D": self.k,
            "ACROSS": across,
            "DOWN": form.grid(self.n, self.k)[0],
            "BLOCK": form.rows or self.n,
            "GROUP": form.columns or self.k,
            "KIND": _CODES[form.code],
            "SCALE": _SCALES.get(form.scale, FLOAT),
            "SIZE": found["scales"].element_size(),
            "ZEROS": form.zeros,
            "FACTOR": form.factor,
        }

    def tile(self, columns: int) -> dict[str, int]:
        """GROUPS and CODES of tiles of `columns` columns, a power of two from LEAST_GROUP on."""
        group = min(columns, self.form.columns or columns)
        return {"GROUPS": columns // group, "CODES": group * self.form.bits // 8}


@triton.jit
def e4m3(code):
    """Codes uint8 of E4M3 as float32: as float16 of the same bits, whose exponents are 8 less."""
    code = code.to(tl.uint16)
    bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e2m1(code):
    """Codes 0 .. 15 of E2M1 as float32, likewise: exponents are 14 less."""
    code = code.to(tl.uint16)
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384


@triton.jit
def load_scale(place, mask, SCALE: tl.constexpr):
    """Scales as float32, 0 where `mask` is False."""
    if SCALE == 3:  # FLOAT
        return tl.load(place, mask=mask, other=0.0).to(tl.float32)
    raw = tl.load(place, mask=mask, other=0)
    if SCALE == 4:  # E8M0: a float32's exponent
        return (raw.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return e4m3(raw)


@triton.jit
def load_tile(
    codes,
    scales,
    zeros,
    row,
    kept,
    first,
    D: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Two tiles float32 [ROWS, GROUPS, CODES] of a matrix [N, D], dequantised, from column `first`
    on: of the low codes and of the high ones; E4M3 has the same twice.

    row [ROWS], of which those in `kept` are the matrix's. 0 outside of it.
    """
    PER: tl.constexpr = 1 if KIND == 0 else 2  # codes in a byte
    run = tl.arange(0, GROUPS)
    block = first // GROUP + run
    column = first + run[:, None] * (CODES * PER) + tl.arange(0, CODES)[None, :] * PER
    inside = kept[:, None, None] & (column < D)[None, :, :]
    raw = tl.load(
        codes + row[:, None, None] * (D // PER) + (column // PER)[None, :, :],
        mask=inside,
        other=0,
        eviction_policy="evict_first",
    )
    real = kept[:, None] & (block < ACROSS)[None, :]
    scale = load_scale(scales + (row // BLOCK)[:, None] * ACROSS + block[None, :], real, SCALE)
    scale = scale[:, :, None]
    if KIND == 0:  # E4M3
        low = e4m3(raw) * scale
        return low, low
    if KIND == 1:  # E2M1
        return e2m1(raw & 15) * scale, e2m1(raw >> 4) * scale
    zero = tl.full((1, 1, 1), 8.0, tl.float32)
    if ZEROS:
        pair = tl.load(zeros + (row // 2)[:, None] * ACROSS + block[None, :], mask=real, other=0)
        zero = ((pair >> ((row % 2) * 4).to(tl.uint8)[:, None]) & 15).to(tl.float32)[:, :, None]
    low = ((raw & 15).to(tl.float32) - zero) * scale
    return low, ((raw >> 4).to(tl.float32) - zero) * scale


@triton.jit
def load_flat(
    codes,
    scales,
    zeros,
    row,
    kept,
    first,
    dtype: tl.constexpr,
    D: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
):
    """The same as one tile [ROWS, columns] in `dtype`, columns in order."""
    low, high = load_tile(
        codes, scales, zeros, row, kept, first, D, ACROSS, BLOCK, GROUP, KIND, SCALE, ZEROS, GROUPS,
        CODES,
    )  # fmt: skip
    if KIND == 0:
        flat = tl.reshape(low.to(dtype), (low.shape[0], GROUPS * CODES))
    else:
        both = tl.join(low.to(dtype), high.to(dtype))
        flat = tl.reshape(both, (low.shape[0], GROUPS * CODES * 2))
    return flat
