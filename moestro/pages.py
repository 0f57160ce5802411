"""Anonymous memory that the system may keep in huge pages: fewer look-ups for scattered reads."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt


def mapped(nbytes: int, huge_from: int) -> npt.NDArray[np.uint8]:
    """`nbytes` zeros, of which only what is written takes memory. From `huge_from` bytes on the
    system is asked for huge pages, which round what is taken up to 2 MiB. The array keeps the
    mapping alive; it is unmapped when the last view is gone."""
    mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= huge_from and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)
