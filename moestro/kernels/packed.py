"""Quantised matrices as torch computes with them: the reference of every format.

Owns: what packed bytes mean as numbers, and quantising to them. Does not own: where the bytes lie
(`kernels.formats` says) or kernels that read them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moestro.kernels.formats import Code, Field, Format

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E4M3_MOST, E2M1_MOST = 448.0, 6.0


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`stack` matrices [n, k] in `format`, one below the other, in `data` uint8 [format.nbytes]."""

    format: Format
    n: int
    k: int
    data: torch.Tensor
    stack: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """[stack * n, k]."""
        return self.stack * self.n, self.k

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.data.nbytes

    def field(self, name: str) -> torch.Tensor:
        """View of the field called `name` in its own dtype."""
        fields = self.format.fields(self.n, self.k, self.stack)
        return view(self.data, next(field for field in fields if field.name == name))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[stack * n, k], computed in float32 and rounded once."""
        return dequantize(self.format, self.data, self.n, self.k, dtype, stack=self.stack)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed matrices with the same columns, one below the other: a weight [rows, k]."""

    parts: tuple[PackedMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, k]."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].k

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.parts)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[rows, k]."""
        found = [part.dequantize(dtype) for part in self.parts]
        return torch.cat(found) if len(found) > 1 else found[0]


Weight = torch.Tensor | PackedRows


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, k] weight^T [rows, k] + bias; a packed weight is dequantised to x's dtype first."""
    if isinstance(weight, PackedRows):
        weight = weight.dequantize(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def view(data: torch.Tensor, field: Field) -> torch.Tensor:
    """The field of a packed matrix in `data` uint8 [nbytes], as a view of its shape and dtype."""
    raw = data[field.offset : field.offset + field.nbytes]
    dtype: torch.dtype = getattr(torch, field.dtype)
    return raw.view(dtype).view(field.shape)


def dequantize(
    format: Format, data: torch.Tensor, n: int, k: int, dtype: torch.dtype, *, stack: int = 1
) -> torch.Tensor:
    """`stack` matrices [n, k] out of `data` uint8 [format.nbytes]: [stack * n, k] in `dtype`,
    computed in float32 and rounded once."""
    found = {field.name: view(data, field) for field in format.fields(n, k, stack)}
    values = _values(format, found["codes"]).view(stack, n, k)
    scales = found["scales"].float().view(stack, *format.grid(n, k))
    if "factor" in found:
        scales = scales * found["factor"][:, :, None]
    if "zeros" in found:
        zeros = _nibbles(found["zeros"].t()).t().float().view(stack, n, -1)
        values -= _spread(zeros, 2, format.columns, k)
    scales = _spread(_spread(scales, 1, format.rows, n), 2, format.columns, k)
    return (values * scales).view(stack * n, k).to(dtype)


def quantize(format: Format, weight: torch.Tensor, *, stack: int = 1) -> torch.Tensor:
    """uint8 [format.nbytes]: float `weight` [stack * n, k] in `format`. Scales follow the largest
    magnitude of their block.

    Codes are rounded to nearest. Scales of MXFP4 are those of the OCP microscaling specification
    1.0, section 6.3. INT4 has the largest of a group at code 0, exactly, so that its scale may be
    negative; zero points are all 8.
    """
    n, k = weight.shape[0] // stack, weight.shape[1]
    assert format.lacks(n, k) is None, format.lacks(n, k)
    factor = torch.ones(stack, 1, device=weight.device)
    if format.factor:
        largest = weight.abs().view(stack, -1).amax(1, keepdim=True).float()
        factor = torch.where(largest > 0, largest / (E2M1_MOST * E4M3_MOST), 1.0)
        weight = (weight.float().view(stack, -1) / factor).view(weight.shape)
    blocks = _blocks(format, weight.float().view(stack, n, k))  # [stack, down, rows, across, cols]
    most = blocks.abs().amax((2, 4), keepdim=True)
    match format.code:
        case Code.E4M3:
            scales = torch.where(most > 0, most / E4M3_MOST, 1.0)
            codes = (blocks / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        case Code.E2M1 if format.scale == "float8_e4m3fn":
            scales = (most / E2M1_MOST).to(torch.float8_e4m3fn).float()
            codes = _to_e2m1(torch.where(scales > 0, blocks / scales, 0.0))
        case Code.E2M1:
            exponent = torch.frexp(most).exponent - 1 - 2  # 2 ** 2 is the largest power in E2M1
            exponent = exponent.clamp(-127, 127)
            scales = torch.ldexp(torch.ones_like(most), exponent)
            codes = _to_e2m1(blocks / scales)
        case Code.INT4:
            largest = torch.where(blocks.amax((2, 4), keepdim=True) == most, most, -most)
            scales = (largest / -8).to(getattr(torch, format.scale)).float()
            inverse = torch.where(scales != 0, 1 / scales, 0.0)
            codes = (blocks * inverse).round().add(8).clamp(0, 15).to(torch.uint8)
    flat = codes.reshape(stack, -1, codes.shape[3] * codes.shape[4])[:, :n, :k]
    flat = flat.reshape(stack * n, k)
    if format.bits == 4:
        flat = flat[:, 0::2] | flat[:, 1::2] << 4
    data = torch.zeros(format.nbytes(n, k, stack), dtype=torch.uint8, device=weight.device)
    values = {"codes": flat, "scales": scales, "factor": factor}
    for field in format.fields(n, k, stack):
        target = view(data, field)
        if field.name == "zeros":
            target.fill_(0x88)
        else:
            target.copy_(values[field.name].view(field.shape))
    return data


def _values(format: Format, codes: torch.Tensor) -> torch.Tensor:
    """Codes [rows, bytes] as float32 [rows, k]; INT4 without zero points less 8."""
    if format.code is Code.E4M3:
        return codes.view(torch.float8_e4m3fn).float()
    nibbles = _nibbles(codes)
    if format.code is Code.E2M1:
        table = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
        return table[nibbles.int()]
    return nibbles.float() if format.zeros else nibbles.float() - 8


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, c] -> [rows, 2c]: low halves at even places, high halves at odd ones."""
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def _spread(values: torch.Tensor, dim: int, block: int, size: int) -> torch.Tensor:
    """Each of `values` repeated `block` times along `dim` (0: all), cut to `size`."""
    if values.shape[dim] == 1 or block == 1:
        return values  # broadcast, or there already
    return values.repeat_interleave(block, dim).narrow(dim, 0, size)


def _blocks(format: Format, weight: torch.Tensor) -> torch.Tensor:
    """weight [stack, n, k] -> [stack, down, rows, across, columns], padded with zeros."""
    _, n, k = weight.shape
    down, across = format.grid(n, k)
    rows, columns = format.rows or n, format.columns or k
    padded: Any = torch.nn.functional.pad(weight, (0, across * columns - k, 0, down * rows - n))
    blocks: torch.Tensor = padded.view(-1, down, rows, across, columns)
    return blocks


def _to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest values, of two equally near the one with an even code, the largest
    beyond it."""
    edges = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=values.device)
    size = values.abs().contiguous()
    above = torch.bucketize(size, edges, right=True)  # on an edge: the greater code
    tie = (torch.bucketize(size, edges) != above) & (above % 2 == 1)
    code = (above - tie.long()).to(torch.uint8)
    return code | torch.signbit(values).to(torch.uint8) << 3
