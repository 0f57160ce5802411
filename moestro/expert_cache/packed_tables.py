"""The device's tables in one piece of memory, so that one copy brings them up to date.

Owns: their place in it, and the copies. Does not own: what they say (`expert_cache.device_cache`),
or the addresses of experts in host memory, which go by themselves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moestro.expert_cache.policy import Bools, Ints
from moestro.kernels.gpu.tables import CacheTables
from moestro.kernels.gpu.transfer import upload


class PackedTables:
    """`tables` of a cache that holds nothing, on a device."""

    def __init__(
        self, layers: int, experts: int, slots: int, ring: int, device: torch.device
    ) -> None:
        keys = layers * experts
        sizes = [("fault", 2), ("slot_of", keys), ("owner", slots)]
        sizes += [("victims", slots), ("cursor", 2), ("share", experts + 1)]
        sizes += [("admit", -(-keys // 4))]
        self._all = torch.zeros(sum(n for _, n in sizes), dtype=torch.int32, device=device)
        spans, lo = {}, 0
        for name, size in sizes:
            spans[name] = slice(lo, lo + size)
            lo += size
        self._spans = spans
        view = {name: self._all[span] for name, span in spans.items()}
        self.tables = CacheTables(
            slot_of=view["slot_of"],
            owner=view["owner"],
            source=torch.zeros(keys, dtype=torch.int64, device=device),
            admit=view["admit"].view(torch.uint8)[:keys],
            victims=view["victims"],
            cursor=view["cursor"],
            fault=view["fault"],
            share=view["share"],
            slots=slots,
            ring=ring,
            experts=experts,
        )

    def send_all(
        self, slot_of: Ints, owner: Ints, victims: Ints, admit: Bools, share: Ints
    ) -> None:
        """What is where, what may leave in which order, which keys may come, and how many of the
        missing ones the CPU computes; no fault."""
        packed = self._ranked(victims, admit, share)
        packed[self._spans["slot_of"]] = slot_of
        packed[self._spans["owner"]] = owner
        upload(packed, self._all)

    def send_ranking(self, victims: Ints, admit: Bools, share: Ints) -> None:
        """Only what may leave, what may come, and the CPU's share."""
        lo = self._spans["victims"].start
        upload(self._ranked(victims, admit, share)[lo:], self._all[lo:])

    def _ranked(self, victims: Ints, admit: Bools, share: Ints) -> npt.NDArray[np.int32]:
        packed = np.zeros(len(self._all), np.int32)
        packed[self._spans["share"]] = share
        packed[self._spans["cursor"]] = 0, len(victims)
        lo = self._spans["victims"].start
        packed[lo : lo + len(victims)] = victims
        packed[self._spans["admit"]].view(np.uint8)[: len(admit)] = admit
        return packed
