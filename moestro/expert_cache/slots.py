"""Device memory for experts: one slab, cut into slots, with typed views of each slot made once.

Owns: the slab and the copy into it. Does not know which expert is in a slot (`slot_table`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moestro.expert_cache.layout import ExpertLayout
from moestro.kernels.packed import PackedMatrix


class SlotPool:
    """`capacity` slots of `layout.nbytes` bytes. Kernels read `gate_up[slot]`, `down[slot]`, or
    `packed[slot]`, the same two, when the layout is packed; and `biases[slot]` of the two."""

    def __init__(
        self, layout: ExpertLayout, capacity: int, device: str | torch.device, dtype: torch.dtype
    ) -> None:
        self.slab = torch.empty(capacity, layout.nbytes, dtype=torch.uint8, device=device)
        self.gate_up: list[torch.Tensor] = []  # each [2I, H]
        self.down: list[torch.Tensor] = []  # each [H, I]
        self.packed: list[tuple[PackedMatrix, PackedMatrix]] = []
        if layout.format is None:
            self.gate_up = self._views(layout, "gate_up", dtype)
            self.down = self._views(layout, "down", dtype)
        else:
            self.packed = [_matrices(layout, row) for row in self.slab.unbind(0)]
        self.biases: list[tuple[torch.Tensor, torch.Tensor]] = []  # each [2I], [H]
        if layout.has_bias:
            both = (self._views(layout, name, dtype) for name in ("gate_up_bias", "down_bias"))
            self.biases = [(up[:, 0], down[:, 0]) for up, down in zip(*both, strict=True)]
        # On the CPU numpy copies: it frees the GIL and starts no threads of its own.
        self._host: npt.NDArray[np.uint8] | None = (
            self.slab.numpy() if self.slab.device.type == "cpu" else None
        )

    def _views(self, layout: ExpertLayout, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        part = layout.part(name)
        end = part.offset + part.shape[0] * part.shape[1] * dtype.itemsize
        flat = self.slab[:, part.offset : end].view(dtype)
        return [row.view(part.shape) for row in flat.unbind(0)]

    def write(self, slot: int, blob: npt.NDArray[np.uint8]) -> None:
        """Copy one blob [nbytes] into a slot. Any thread; the caller owns the slot."""
        if self._host is not None:
            np.copyto(self._host[slot], blob)
        else:
            self.slab[slot].copy_(torch.from_numpy(blob))

    def read(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, [nbytes], on the host."""
        out: npt.NDArray[np.uint8] = self.slab[slot].cpu().numpy()
        return out


def _matrices(layout: ExpertLayout, blob: torch.Tensor) -> tuple[PackedMatrix, PackedMatrix]:
    """gate_up and down of a packed blob, uint8 [nbytes]."""
    form, hidden, width = layout.format, layout.hidden, layout.intermediate
    assert form is not None
    up, down = blob[layout.start("gate_up") :], blob[layout.start("down") :]
    return (
        PackedMatrix(form, width, hidden, up[: form.nbytes(width, hidden, 2)], 2),
        PackedMatrix(form, hidden, width, down[: form.nbytes(hidden, width)]),
    )
