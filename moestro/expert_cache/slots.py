"""Device memory for experts: one slab, cut into slots, with typed views of each slot made once.

Owns: the slab and the copy into it. Does not know which expert is in a slot (`slot_table`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moestro.expert_cache.layout import ExpertLayout


class SlotPool:
    """`capacity` slots of `layout.nbytes` bytes. Kernels read `gate_up[slot]`, `down[slot]`."""

    def __init__(
        self, layout: ExpertLayout, capacity: int, device: str | torch.device, dtype: torch.dtype
    ) -> None:
        self.slab = torch.empty(capacity, layout.nbytes, dtype=torch.uint8, device=device)
        self.gate_up = self._views(layout, "gate_up", dtype)  # each [2I, H]
        self.down = self._views(layout, "down", dtype)  # each [H, I]
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
