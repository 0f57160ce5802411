"""A store that quantises what another one reads: --expert-dtype.

Owns: the step from one expert's plain matrices to its packed ones. Does not own: what rounding is
done (`kernels.packed`) or reading (`expert_cache.store`). The bytes are the same at every read.
"""

from __future__ import annotations

import numpy as np
import torch

from moestro.expert_cache.layout import ExpertLayout
from moestro.expert_cache.store import ExpertStore
from moestro.kernels.packed import quantize


class QuantizingStore:
    """Reads experts from `plain`, whose layout is of float32, into the packed `layout`."""

    def __init__(self, plain: ExpertStore, layout: ExpertLayout) -> None:
        assert plain.layout.dtype == "float32" and plain.layout.format is None
        assert layout.format is not None
        self.layout = layout
        self._format = layout.format
        self._plain = plain

    def read(self, layer: int, expert: int, out: memoryview) -> int:
        """See `ExpertStore.read`; returns the bytes of the plain expert."""
        blob = np.empty(self._plain.layout.nbytes, np.uint8)
        done = self._plain.read(layer, expert, blob.data)
        target = torch.frombuffer(out, dtype=torch.uint8)
        for name, stack in (("gate_up", 2), ("down", 1)):
            part = self._plain.layout.part(name)
            raw = torch.from_numpy(blob[part.offset : part.offset + part.nbytes])
            data = quantize(self._format, raw.view(torch.float32).view(part.shape), stack=stack)
            start = self.layout.start(name)
            target[start : start + len(data)] = data
        for name in ("gate_up_bias", "down_bias") if self.layout.has_bias else ():
            part, kept = self._plain.layout.part(name), self.layout.part(name)
            values = torch.from_numpy(blob[part.offset : part.offset + part.nbytes])
            room = target[kept.offset : kept.offset + kept.nbytes]
            room.view(getattr(torch, kept.dtype)).copy_(values.view(torch.float32))
        return done
