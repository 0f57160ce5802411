"""Dense MLPs on the device: of layers without experts, and shared experts.

Owns: their buffers and how many bytes these take. Does not own: weights, or adding to the residual.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moestro.engine.gpu.product import product
from moestro.engine.models.spec import ModelSpec
from moestro.engine.weights import LayerWeights
from moestro.kernels.gpu.combine import Beside
from moestro.kernels.gpu.swiglu import swiglu
from moestro.kernels.packed import Weight

ROWS = 2048  # of a sweep, that are computed together


class Mlp:
    """Computes the MLPs of one model, of up to `rows` rows at a time."""

    def __init__(
        self, spec: ModelSpec, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shared = spec.moe.shared
        self.rows = min(rows, ROWS)
        self._wide = torch.empty(3 * widest(spec) * self.rows, dtype=dtype, device=device)
        self._added = torch.empty(rows if shared else 0, spec.hidden, dtype=dtype, device=device)
        gated = rows if shared is not None and shared.gated else 0
        self._gate = torch.empty(gated, 1, dtype=dtype, device=device)

    @staticmethod
    def nbytes(spec: ModelSpec, rows: int, size: int) -> int:
        """What an `Mlp` takes for elements of `size` bytes."""
        shared = spec.moe.shared
        beside = 0 if shared is None else rows * (spec.hidden + shared.gated)
        return (3 * widest(spec) * min(rows, ROWS) + beside) * size

    def pieces(self, count: int) -> Iterator[slice]:
        """Rows 0 .. count, as many together as may be."""
        for lo in range(0, count, self.rows):
            yield slice(lo, min(lo + self.rows, count))

    def dense(self, layer: LayerWeights, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, hidden] = the MLP of a layer without experts, T <= `rows`."""
        assert layer.gate_up is not None and layer.down is not None
        self._compute(layer.gate_up, layer.down, x, out)

    def shared(self, layer: LayerWeights, x: torch.Tensor, first: int = 0) -> None:
        """The shared expert of x [T, hidden], T <= `rows`, into rows `first` and on of `beside`."""
        assert layer.shared_gate_up is not None and layer.shared_down is not None
        rows = slice(first, first + len(x))
        self._compute(layer.shared_gate_up, layer.shared_down, x, self._added[rows])
        if layer.shared_gate is not None:
            product(x, layer.shared_gate, None, self._gate[rows])

    def beside(self, count: int) -> Beside:
        """What `shared` gave for the first `count` rows."""
        return Beside(self._added[:count], self._gate[:count] if len(self._gate) else None)

    def _compute(self, gate_up: Weight, down: Weight, x: torch.Tensor, out: torch.Tensor) -> None:
        count, width = len(x), down.shape[1]
        wide = self._wide[: 2 * width * count].view(count, 2 * width)
        inner = self._wide[2 * width * count :][: width * count].view(count, width)
        product(x, gate_up, None, wide)
        swiglu(wide, out=inner)
        product(inner, down, None, out)


def widest(spec: ModelSpec) -> int:
    """Width of the widest dense MLP of a model, 0 when it has none."""
    shared = spec.moe.shared
    dense = (layer.intermediate for layer in spec.layers if layer.moe is None)
    return max(dense, default=0) if shared is None else max(shared.intermediate, *dense, 0)
