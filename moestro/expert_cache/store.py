"""The disk tier: reads one expert as one blob.

Owns: the checkpoint's open files and the conversion between the file's dtype and the blob's. Does
not own the memory it fills. Every store may be called from several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from moestro.errors import ModelError
from moestro.expert_cache.direct import (
    Buffers,
    Bytes,
    File,
    NotDirect,
    Run,
    buffer_bytes,
    cut_short,
    join,
    unreadable,
)
from moestro.expert_cache.layout import DTYPE_BYTES, ExpertLayout, ExpertSource, Extent, Part
from moestro.expert_cache.repack import REPACK
from moestro.kernels.formats import FIELD_BYTES
from moestro.kernels.packed import quantize


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
    """Reads byte ranges of the checkpoint's own files, straight into the blob when dtypes agree.

    `direct`: past the page cache (O_DIRECT), which is for disks that are faster than one copy
    and for memory that the arena needs. Files whose filesystem refuses are read through it.
    """

    def __init__(
        self, layout: ExpertLayout, sources: Sequence[ExpertSource], *, direct: bool = False
    ) -> None:
        self.layout = layout
        self._parts = {part.name: part for part in layout.parts}
        for source in sources:
            _check_source(self._parts, source)
        self._runs = {(source.layer, source.expert): join(source.extents) for source in sources}
        if len(self._runs) != len(sources):
            raise ModelError(f"{len(sources) - len(self._runs)} experts have two sources")
        self._buffers = Buffers(buffer_bytes(run for runs in self._runs.values() for run in runs))
        self._files: dict[str, File] = {}
        try:
            for path, end in _ends(sources).items():
                self._open(path, end, direct)
        except BaseException:
            self.close()
            raise

    @property
    def direct_files(self) -> int:
        """How many files are read past the page cache."""
        return sum(file.direct for file in self._files.values())

    @property
    def reason(self) -> str | None:
        """Why a file is not, though that was asked for."""
        return next((file.reason for file in self._files.values() if file.reason), None)

    def read(self, layer: int, expert: int, out: memoryview) -> int:
        """See `ExpertStore.read`."""
        runs = self._runs.get((layer, expert))
        if runs is None:
            raise ModelError(f"the checkpoint has no expert {expert} in MoE layer {layer}")
        for run in runs:
            self._read_run(run, out)
        return sum(extent.nbytes for run in runs for extent in run.extents)

    def close(self) -> None:
        """Close every file and free the buffers. No `read` may be running."""
        while self._files:
            self._files.popitem()[1].close()
        self._buffers.close()

    def _open(self, path: str, end: int, direct: bool) -> None:
        try:
            file = self._files[path] = File(path, direct=direct)
        except OSError as error:
            raise ModelError(f"cannot open {path}: {error.strerror}") from error
        size = os.fstat(file.fd).st_size
        if size < end:
            raise ModelError(f"{path} is cut short: {size} bytes, tensors end at offset {end}")

    def _read_run(self, run: Run, out: memoryview) -> None:
        file = self._files[run.path]
        if file.direct:
            try:
                self._read_direct(file, run, out)
                return
            except NotDirect:
                file.give_up()
        for extent in run.extents:
            raw = self._raw(extent, out)
            _read_exactly(file.fd, extent, raw)
            self._finish(extent, raw, out)

    def _read_direct(self, file: File, run: Run, out: memoryview) -> None:
        raws = [self._raw(extent, out) for extent in run.extents]
        with self._buffers.take() as buffer:
            for at, data in file.pieces(run, buffer):
                for extent, raw in zip(run.extents, raws, strict=True):
                    _copy_overlap(at, data, extent.offset, raw)
        for extent, raw in zip(run.extents, raws, strict=True):
            self._finish(extent, raw, out)

    def _target(self, extent: Extent, out: memoryview) -> Bytes:
        part = self._parts[extent.part]
        size = FIELD_BYTES[part.dtype]
        first, last = (part.offset + at * size for at in part.rows(*_rows(extent)))
        return np.frombuffer(out[first:last], np.uint8)

    def _raw(self, extent: Extent, out: memoryview) -> Bytes:
        """Where an extent's bytes are to be read to: their place in the blob if they fit as they
        are."""
        kept = extent.dtype == self._parts[extent.part].dtype
        if kept and not extent.transposed and not extent.repack:
            return self._target(extent, out)
        return np.empty(extent.nbytes, np.uint8)

    def _finish(self, extent: Extent, raw: Bytes, out: memoryview) -> None:
        wanted = self._parts[extent.part].dtype
        if extent.transposed:
            raw = _transposed(raw, extent)
        if extent.repack:
            raw = REPACK[extent.repack](raw, extent.rows)
        if extent.dtype != wanted:
            _convert(raw, extent.dtype, self._target(extent, out), wanted)
        elif extent.transposed or extent.repack:
            np.copyto(self._target(extent, out), raw)


class DummyStore:
    """Random weights, N(0, 0.02): the same bytes for the same (seed, layer, expert), every time.

    One pool of random numbers is drawn at the start and each expert is a window of it, so that a
    read costs a copy. Reads are reported as a disk would report them.
    """

    _SPREAD = 1 << 20  # elements by which windows may differ; 8 apart from one expert to the next

    def __init__(self, layout: ExpertLayout, seed: int) -> None:
        self.layout = layout
        self._size = DTYPE_BYTES[layout.dtype]
        random = np.random.default_rng(seed)
        self._pool: Bytes
        if layout.format is not None:
            self._pool = _packed_blob(layout, random)
            return
        draws = random.standard_normal(layout.nbytes // self._size + self._SPREAD, dtype=np.float32)
        pool = torch.from_numpy(draws).mul_(0.02).to(getattr(torch, layout.dtype))
        self._pool = pool.view(torch.uint8).numpy()

    def read(self, layer: int, expert: int, out: memoryview) -> int:
        """See `ExpertStore.read`."""
        if self.layout.format is not None:
            return self._read_packed(16 * (layer * 1024 + expert), np.frombuffer(out, np.uint8))
        start = (layer * 1024 + expert) * 8 % self._SPREAD * self._size
        np.copyto(np.frombuffer(out, np.uint8), self._pool[start : start + self.layout.nbytes])
        return self.layout.nbytes

    def _read_packed(self, shift: int, out: Bytes) -> int:
        """The one packed expert with its codes `shift` bytes on, and scales as they are."""
        np.copyto(out, self._pool)
        for part in self.layout.parts:
            if part.name.endswith(".codes"):
                span = slice(part.offset, part.offset + part.nbytes)
                out[span] = np.roll(self._pool[span], shift)
        return self.layout.nbytes


def _packed_blob(layout: ExpertLayout, random: np.random.Generator) -> Bytes:
    assert layout.format is not None
    blob = np.zeros(layout.nbytes, np.uint8)
    hidden, width = layout.hidden, layout.intermediate
    for name, shape, stack in (
        ("gate_up", (2 * width, hidden), 2),
        ("down", (hidden, width), 1),
    ):
        draws = torch.from_numpy(random.standard_normal(shape, dtype=np.float32)).mul_(0.02)
        data = quantize(layout.format, draws, stack=stack).numpy()
        blob[layout.start(name) :][: len(data)] = data
    return blob


def _copy_overlap(at: int, data: Bytes, start: int, raw: Bytes) -> None:
    """Copy what `data`, at offset `at` of a file, has of `raw`, which is at offset `start`."""
    lo, hi = max(at, start), min(at + len(data), start + len(raw))
    if lo < hi:  # numpy copies without the GIL
        np.copyto(raw[lo - start : hi - start], data[lo - at : hi - at])


def _transposed(raw: Bytes, extent: Extent) -> Bytes:
    """Columns as rows: the elements of `raw` [n, rows] as [rows, n]."""
    elements = raw.view(f"u{DTYPE_BYTES[extent.dtype]}").reshape(-1, extent.rows)
    return np.ascontiguousarray(elements.T).reshape(-1).view(np.uint8)


def _convert(raw: Bytes, found: str, target: Bytes, wanted: str) -> None:
    """Write the elements of `raw` to `target` in another dtype."""
    if (found, wanted) == ("bfloat16", "float32"):
        # The usual case on a CPU, in numpy: torch would start threads of its own in each worker.
        np.left_shift(raw.view(np.uint16), 16, out=target.view(np.uint32), dtype=np.uint32)
        return
    source = torch.from_numpy(raw).view(getattr(torch, found))
    torch.from_numpy(target).view(getattr(torch, wanted)).copy_(source)


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
        if extent.part not in parts or not _readable(extent.dtype, parts[extent.part].dtype):
            raise ModelError(f"{name}: cannot read {extent.part!r} of dtype {extent.dtype!r}")
        expected = extent.rows * parts[extent.part].shape[1] * FIELD_BYTES[extent.dtype]
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


def _readable(found: str, wanted: str) -> bool:
    return found == wanted or (found in DTYPE_BYTES and wanted in DTYPE_BYTES)


def _read_exactly(fd: int, extent: Extent, out: Bytes) -> None:
    done = 0
    while done < extent.nbytes:
        at = extent.offset + done
        try:
            got = os.preadv(fd, [out[done:].data], at)
        except OSError as error:
            raise unreadable(extent.path, at, error) from error
        if got == 0:
            raise cut_short(extent.path, at, extent.nbytes - done)
        done += got
