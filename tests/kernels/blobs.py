"""Random experts as they lie in an arena, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moestro.kernels import reference as ops
from moestro.kernels.cpu_experts import CpuShape

ALIGN = 256
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Blobs:
    """`count` experts of [2 * inner, hidden] and [hidden, inner], one blob each."""

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        weights: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        stored = weights or dtype
        draw = torch.Generator().manual_seed(seed)
        up = 2 * inner * hidden
        offset = -(-up * stored.itemsize // ALIGN) * ALIGN
        total = -(-(offset + hidden * inner * stored.itemsize) // ALIGN) * ALIGN
        self.shape = CpuShape(hidden, inner, dtype, offset, weights)
        self.memory = torch.zeros(count, total, dtype=torch.uint8)
        self.gate_up: list[torch.Tensor] = []
        self.down: list[torch.Tensor] = []
        for blob in self.memory:
            tail = blob[offset : offset + hidden * inner * stored.itemsize].view(stored)
            self.gate_up.append(blob[: up * stored.itemsize].view(stored).view(2 * inner, hidden))
            self.down.append(tail.view(hidden, inner))
            for part in (self.gate_up[-1], self.down[-1]):
                part.copy_(torch.randn(part.shape, generator=draw) * part.shape[1] ** -0.5)

    @property
    def addresses(self) -> list[int]:
        """Of every blob."""
        return [blob.data_ptr() for blob in self.memory]

    @property
    def range(self) -> tuple[int, int]:
        """(address, bytes) of all of them."""
        return self.memory.data_ptr(), self.memory.numel()

    def expected(
        self, sizes: Sequence[int], source: npt.NDArray[np.int32], x: torch.Tensor
    ) -> torch.Tensor:
        """What `kernels.reference` says in float64, in the order of the routes."""
        used = [e for e, size in enumerate(sizes) if size]
        rows = x.double()[torch.from_numpy(source).long()]
        return ops.grouped_experts(
            rows,
            [sizes[e] for e in used],
            [self.gate_up[e].double().t() for e in used],
            [self.down[e].double().t() for e in used],
        )


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to within the rounding of intermediate values to the activations' dtype."""
    atol = ROUNDING[got.dtype] * max(1e-30, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol)
