"""The disk tier: reads one expert as one blob.

Owns: file descriptors and the conversion between the file's dtype and the blob's. Does not own
the memory it fills. Every store may be called from several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moestro.errors import ModelError
from moestro.expert_cache.layout import DTYPE_BYTES, ExpertLayout, ExpertSource, Extent, Part


class ExpertStore(Protocol):
    """Where experts come from when they are in no faster tier."""

    @property
    def layout(self) -> ExpertLayout:
        """The blob that `read` fills."""

    def read(self, layer: int, expert: int, out: memoryview) -> int:
        """Fill `out` (writable bytes, `layout.nbytes` long); returns bytes read from disk.

        Padding between parts is left as it is. Raises ModelError for a damaged file.
        """


class SafetensorsStore:
    """Reads byte ranges of the checkpoint's own files, straight into the blob when dtypes agree."""

    def __init__(self, layout: ExpertLayout, sources: Sequence[ExpertSource]) -> None:
        self.layout = layout
        self._parts = {part.name: part for part in layout.parts}
        for source in sources:
            _check_source(self._parts, source)
        self._sources = {(source.layer, source.expert): source for source in sources}
        if len(self._sources) != len(sources):
            raise ModelError(f"{len(sources) - len(self._sources)} experts have two sources")
        self._files: dict[str, int] = {}
        try:
            for path, end in _ends(sources).items():
                self._open(path, end)
        except BaseException:
            self.close()
            raise

    def read(self, layer: int, expert: int, out: memoryview) -> int:
        """See `ExpertStore.read`."""
        source = self._sources.get((layer, expert))
        if source is None:
            raise ModelError(f"the checkpoint has no expert {expert} in MoE layer {layer}")
        for extent in source.extents:
            self._read_extent(extent, out)
        return sum(extent.nbytes for extent in source.extents)

    def close(self) -> None:
        """Close every file. No `read` may be running."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _open(self, path: str, end: int) -> None:
        try:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot open {path}: {error.strerror}") from error
        size = os.fstat(self._files[path]).st_size
        if size < end:
            raise ModelError(f"{path} is cut short: {size} bytes, tensors end at offset {end}")

    def _read_extent(self, extent: Extent, out: memoryview) -> None:
        part = self._parts[extent.part]
        size = DTYPE_BYTES[self.layout.dtype]
        first, last = (part.offset + at * size for at in part.rows(*_rows(extent)))
        target = out[first:last]
        fd = self._files[extent.path]
        if extent.dtype == self.layout.dtype:
            _read_exactly(fd, extent, target)
            return
        raw = bytearray(extent.nbytes)
        _read_exactly(fd, extent, memoryview(raw))
        _convert(raw, extent.dtype, target, self.layout.dtype)


class DummyStore:
    """Random weights, N(0, 0.02): the same bytes for the same (seed, layer, expert), every time.

    One pool of random numbers is drawn at the start and each expert is a window of it, so that a
    read costs a copy. Reads are reported as a disk would report them.
    """

    _SPREAD = 1 << 20  # elements by which windows may differ; 8 apart from one expert to the next

    def __init__(self, layout: ExpertLayout, seed: int) -> None:
        self.layout = layout
        self._size = DTYPE_BYTES[layout.dtype]
        draws = np.random.default_rng(seed).standard_normal(
            layout.nbytes // self._size + self._SPREAD, dtype=np.float32
        )
        pool = torch.from_numpy(draws).mul_(0.02).to(getattr(torch, layout.dtype))
        self._pool: npt.NDArray[np.uint8] = pool.view(torch.uint8).numpy()

    def read(self, layer: int, expert: int, out: memoryview) -> int:
        """See `ExpertStore.read`."""
        start = (layer * 1024 + expert) * 8 % self._SPREAD * self._size
        np.copyto(np.frombuffer(out, np.uint8), self._pool[start : start + self.layout.nbytes])
        return self.layout.nbytes


def _convert(raw: bytearray, found: str, target: memoryview, wanted: str) -> None:
    """Write the elements of `raw` to `target` in another dtype."""
    if (found, wanted) == ("bfloat16", "float32"):
        # The usual case on a CPU, in numpy: torch would start threads of its own in each worker.
        bits = np.frombuffer(target, np.uint32)
        np.left_shift(np.frombuffer(raw, np.uint16), 16, out=bits, dtype=np.uint32)
        return
    source = torch.frombuffer(raw, dtype=getattr(torch, found))
    torch.frombuffer(target, dtype=getattr(torch, wanted)).copy_(source)


def _rows(extent: Extent) -> tuple[int, int]:
    return extent.row, extent.row + extent.rows


def _ends(sources: Iterable[ExpertSource]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for source in sources:
        for extent in source.extents:
            ends[extent.path] = max(ends.get(extent.path, 0), extent.offset + extent.nbytes)
    return ends


def _check_source(parts: Mapping[str, Part], source: ExpertSource) -> None:
    """Raise ModelError unless the extents fill every part exactly once."""
    name = f"expert {source.expert} of MoE layer {source.layer}"
    spans: dict[str, list[tuple[int, int]]] = {part: [(0, 0)] for part in parts}
    for extent in source.extents:
        if extent.dtype not in DTYPE_BYTES or extent.part not in parts:
            raise ModelError(f"{name}: cannot read {extent.part!r} of dtype {extent.dtype!r}")
        expected = extent.rows * parts[extent.part].shape[1] * DTYPE_BYTES[extent.dtype]
        if extent.nbytes != expected:
            raise ModelError(
                f"{name}: {extent.rows} rows of {extent.part} are {expected} bytes, "
                f"{extent.path} has {extent.nbytes} at offset {extent.offset}"
            )
        spans[extent.part].append(_rows(extent))
    for part, found in spans.items():
        rows = parts[part].shape[0]
        if any(end != start for (_, end), (start, _) in pairwise([*sorted(found), (rows, rows)])):
            raise ModelError(f"{name}: rows {sorted(found)[1:]} do not fill {part} of {rows} rows")


def _read_exactly(fd: int, extent: Extent, out: memoryview) -> None:
    done = 0
    while done < extent.nbytes:
        at = extent.offset + done
        try:
            got = os.preadv(fd, [out[done:]], at)
        except OSError as error:
            raise ModelError(
                f"cannot read {extent.path} at offset {at}: {error.strerror}"
            ) from error
        if got == 0:
            raise ModelError(
                f"{extent.path} is cut short: it ends at offset {at}, "
                f"{extent.nbytes - done} bytes before the end of an expert"
            )
        done += got
