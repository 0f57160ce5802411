"""The host's processor as a second way to serve misses: its threads, its mailbox, its share.

Owns: their life together. Does not own: the kernels at either end (`kernels.cpu_experts`,
`kernels.gpu.cpu_share`), or the rule for the share (`expert_cache.cpu_split`).
"""

from __future__ import annotations

import logging

import torch

from moestro.expert_cache.arena import HostArena
from moestro.expert_cache.cpu_split import CpuSplit
from moestro.kernels.cpu_experts import CpuExperts, CpuShape
from moestro.kernels.gpu.cpu_share import CpuLink
from moestro.kernels.mailbox import LINE, Mailbox, MailboxShape

log = logging.getLogger(__name__)


class CpuShare:
    """One pool of threads that serves the misses of one `DeviceCache`."""

    def __init__(
        self,
        shape: CpuShape,
        arena: HostArena,
        experts: int,
        *,
        rows: int,
        top_k: int,
        threads: int | None,
        device: torch.device,
    ) -> None:
        """`rows` is the most rows of a step. ValueError when nothing native runs here."""
        self._pool = CpuExperts(shape)
        box = MailboxShape(rows, top_k, shape.hidden, min(experts, rows * top_k), shape.dtype)
        pinned = device.type == "cuda"
        memory = torch.empty(box.nbytes + LINE, dtype=torch.uint8, pin_memory=pinned)
        skip = -memory.data_ptr() % LINE
        mailbox = Mailbox.over(memory[skip:], box)
        self._pool.start(threads)
        self._pool.attach(mailbox, [(arena.address(0), arena.nbytes)])
        self.link = CpuLink.over(mailbox, device)
        self.split = CpuSplit(experts, arena.layout.nbytes)
        self.stalls = 0

    @property
    def description(self) -> str:
        """Which kernels, for people."""
        return f"{self._pool.variant}, {self._pool.threads} threads"

    def stalled(self) -> None:
        """A step waited for an answer in vain."""
        self.stalls += 1
        self.split.stalled()
        log.warning(
            "the CPU did not compute its share of a step's experts in time; all misses go over "
            "the link for a while"
        )

    def close(self) -> None:
        """End the threads. No step may be under way."""
        self._pool.stop()
