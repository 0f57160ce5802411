"""The two products of routed experts on the device, by the kernels that read their format."""

from __future__ import annotations

import torch

from moestro.engine.models.activation import Activation, ClampedSwiGLU
from moestro.expert_cache.layout import ExpertLayout
from moestro.kernels.gpu import experts, experts_sweep, packed_experts, packed_sweep
from moestro.kernels.gpu.experts_sweep import Tiles
from moestro.kernels.gpu.gating import SWIGLU, Gating
from moestro.kernels.gpu.packed import Place
from moestro.kernels.gpu.tables import LayerWork


class ExpertKernels:
    """Experts in slots of `layout`, plain or packed, with `activation` between their products.
    Buffers are as the kernels describe them."""

    def __init__(self, layout: ExpertLayout, activation: Activation) -> None:
        self._offset = layout.start("down")
        self._biases: tuple[int | None, int | None] = None, None
        if layout.has_bias:
            self._biases = layout.part("gate_up_bias").offset, layout.part("down_bias").offset
        self._gating = SWIGLU
        if isinstance(activation, ClampedSwiGLU):
            self._gating = Gating(activation.alpha, activation.limit)
        self._places: tuple[Place, Place] | None = None
        form, hidden, width = layout.format, layout.hidden, layout.intermediate
        if form is not None:
            self._places = (
                Place(form, width, hidden, layout.start("gate_up"), 2),
                Place(form, hidden, width, self._offset),
            )

    def decode(
        self,
        x: torch.Tensor,
        work: LayerWork,
        slab: torch.Tensor,
        k: int,
        y: torch.Tensor,
        z: torch.Tensor,
    ) -> None:
        """z[route] = expert(x[route // k]) for the few routes of a step, by way of y."""
        up, down = self._biases
        gating = self._gating
        if self._places is None:
            experts.expert_up(x, work, slab, k, y=y, gating=gating, bias=up)
            experts.expert_down(y, work, slab, z=z, bias=down)
        else:
            places = self._places
            packed_experts.expert_up(x, work, slab, k, places[0], y=y, gating=gating, bias=up)
            packed_experts.expert_down(y, work, slab, places[1], z=z, bias=down)

    def sweep(
        self,
        x: torch.Tensor,
        order: torch.Tensor,
        tiles: Tiles,
        slab: torch.Tensor,
        k: int,
        y: torch.Tensor,
        z: torch.Tensor,
    ) -> None:
        """The same for the many routes of the tiles of a sweep."""
        up, down = self._biases
        gating = self._gating
        if self._places is None:
            experts_sweep.sweep_up(x, order, tiles, slab, k, y=y, gating=gating, bias=up)
            experts_sweep.sweep_down(y, order, tiles, slab, self._offset, z=z, bias=down)
        else:
            first, second = self._places
            packed_sweep.sweep_up(x, order, tiles, slab, k, first, y=y, gating=gating, bias=up)
            packed_sweep.sweep_down(y, order, tiles, slab, second, z=z, bias=down)
