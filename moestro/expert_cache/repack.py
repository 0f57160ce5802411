"""From the ways in which published checkpoints pack 4-bit matrices to the one that kernels read.

Owns: how the bytes of each are reordered; none adds or drops a byte. Does not own: which tensor of
a checkpoint is packed in which way (`engine.quantized`), or what the bytes mean
(`kernels.formats`). No torch: these run in the threads that read.

Every function takes the file's bytes and the rows that they become.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# AutoAWQ packs 8 columns in 32 bits: nibble i, from the lowest on, is of column AWQ[i].
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def _flat(values: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _columns(size: int) -> Callable[[Bytes, int], Bytes]:
    """Columns become rows, in elements of `size` bytes."""

    def turn(raw: Bytes, rows: int) -> Bytes:
        return _flat(raw.view(f"u{size}").reshape(-1, rows).T)

    return turn


def _interleaved(raw: Bytes, rows: int) -> Bytes:
    """Rows gate, up, gate, up, ... become all gates, then all ups (GPT-OSS)."""
    return _flat(raw.reshape(rows // 2, 2, -1).swapaxes(0, 1))


def _row_zeros(raw: Bytes, rows: int) -> Bytes:
    """int32 [N / 8, G], each 8 rows of one column, to pairs of rows [N / 2, G]."""
    return _flat(raw.reshape(rows // 4, -1, 4).swapaxes(1, 2))


def _column_zeros(raw: Bytes, rows: int) -> Bytes:
    """int32 [G, N / 8] to pairs of rows [N / 2, G]."""
    return _flat(raw.reshape(-1, rows).T)


def _column_zeros_less_1(raw: Bytes, rows: int) -> Bytes:
    """The same of zero points that are stored less 1 (modulo 16), as GPTQ's first format does."""
    one, low = np.uint8(1), np.uint8(15)
    halves = (raw + one) & low | ((raw >> 4) + one) << 4
    return _column_zeros(halves.astype(np.uint8, copy=False), rows)


def _awq_codes(raw: Bytes, rows: int) -> Bytes:
    """int32 [K, N / 8] to pairs of columns [N, K / 2]."""
    codes = np.ascontiguousarray(_awq_columns(raw, rows).T)  # [N, K]
    return _flat(codes[:, 0::2] | codes[:, 1::2] << 4)


def _awq_zeros(raw: Bytes, rows: int) -> Bytes:
    """int32 [G, N / 8] to pairs of rows [N / 2, G]."""
    zeros = _awq_columns(raw, 2 * rows).T  # [N, G]
    return _flat(zeros[0::2] | zeros[1::2] << 4)


def _awq_columns(raw: Bytes, count: int) -> Bytes:
    """int32 [n, count / 8] to one value a byte, in the order of columns: [n, count]."""
    found = raw.reshape(-1, count // 8, 4)
    columns = np.empty((*found.shape[:2], 8), np.uint8)
    columns[..., AWQ[0::2]] = found & 15
    columns[..., AWQ[1::2]] = found >> 4
    return columns.reshape(-1, count)


def _inverse(raw: Bytes, rows: int) -> Bytes:
    """A divisor becomes a factor."""
    return _flat(1 / raw.view(np.float32))


REPACK: dict[str, Callable[[Bytes, int], Bytes]] = {
    "columns of 16 bits": _columns(2),
    "columns of 32 bits": _columns(4),
    "interleaved": _interleaved,
    "zeros in rows": _row_zeros,
    "zeros in columns": _column_zeros,
    "zeros in columns, less 1": _column_zeros_less_1,
    "awq": _awq_codes,
    "awq zeros": _awq_zeros,
    "inverse": _inverse,
}
