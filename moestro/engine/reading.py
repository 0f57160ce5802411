"""How whoever puts a decoder's weights together asks for them.

Owns: the protocol, and joining matrices row-wise. Does not own: where weights come from
(`engine.weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from moestro.kernels.packed import PackedRows, Weight

Shape = tuple[int, ...]


class Read(Protocol):
    """Gives the tensor of a name and a shape, in the compute dtype or float32 (`wide`)."""

    def __call__(self, name: str, shape: Shape, *, wide: bool = False) -> torch.Tensor:
        """ModelError when it is missing or of another shape."""

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """The same for a matrix that is multiplied with and nothing else: packed if the checkpoint
        has it so."""


def join_rows(parts: Sequence[Weight]) -> Weight:
    """Matrices with the same columns, one below the other. They stay packed if all are."""
    if len(parts) == 1:
        return parts[0]
    packed = [part for part in parts if isinstance(part, PackedRows)]
    if len(packed) == len(parts):
        return PackedRows(tuple(matrix for part in packed for matrix in part.parts))
    plain = next(part for part in parts if isinstance(part, torch.Tensor))
    return torch.cat(
        [part.dequantize(plain.dtype) if isinstance(part, PackedRows) else part for part in parts]
    )
