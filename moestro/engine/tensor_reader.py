"""Reads many tensors in parallel, in the order in which they will be asked for.

Owns: the threads, a bounded number of buffers between the files and the device, and the copy of
each piece to its place. Does not own: which tensors there are and what they mean (`weights`).

Threads only read: a piece of a tensor into a buffer. The thread that asks for tensors copies from
the buffers, so that no other one talks to the device. On a GPU buffers are page-locked where the
system allows it, and files are read past the page cache, at the speed of the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import torch

from moestro.engine.checkpoint import TensorRef
from moestro.errors import ModelError
from moestro.expert_cache.direct import BLOCK, Bytes, File, aligned
from moestro.expert_cache.page_lock import CudaLocker, lock_whole

READERS = 8  # threads, and buffers: 128 MiB in all
PIECE = 16 << 20  # bytes of one read; a multiple of every element's size
READ_SECONDS = 120.0  # longest wait for one piece; a disk that takes longer is broken


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes lo .. hi of a tensor."""

    ref: TensorRef
    lo: int
    hi: int


@dataclass(slots=True)
class _Read:
    """A piece in a buffer, or why it could not be read."""

    piece: Piece
    buffer: Bytes
    data: Bytes | None
    error: Exception | None = None


class TensorReader:
    """A context manager: reads `refs` to `device` in `dtype`, or float32 those that are named in
    `wide`, or as they are, uint8 [nbytes], those in `raw`. `take` each of them, in this order.

    `progress(done, total)` counts bytes of the files.
    """

    def __init__(
        self,
        refs: Sequence[TensorRef],
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
        *,
        wide: frozenset[str] = frozenset(),
        raw: frozenset[str] = frozenset(),
    ) -> None:
        self._raw = raw
        self._dtype = dtype
        self._wide = wide
        self._device = device
        self._progress = progress
        self._total = sum(ref.nbytes for ref in refs)
        self._done = 0
        self._left = {ref.name: ref.nbytes for ref in refs}
        self._tensors: dict[str, torch.Tensor] = {}
        self._free: SimpleQueue[Bytes | None] = SimpleQueue()
        self._read: SimpleQueue[_Read] = SimpleQueue()
        with ExitStack() as stack:
            paths = dict.fromkeys(ref.path for ref in refs)
            self._files = {path: _open(path, device, stack) for path in paths}
            self._get_buffers(stack)
            pool = ThreadPoolExecutor(READERS, "tensor-reader")
            stack.callback(self._stop, pool)
            for piece in _pieces(refs):
                pool.submit(self._work, piece)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def take(self, ref: TensorRef) -> torch.Tensor:
        """The tensor, when all of it is there. ModelError when it cannot be read."""
        while self._left[ref.name]:
            self._place(self._next(ref))
        return self._tensors.pop(ref.name) if ref.nbytes else self._empty(ref)

    def _get_buffers(self, stack: ExitStack) -> None:
        for _ in range(READERS):
            buffer = aligned(PIECE + 2 * BLOCK)
            if self._device.type == "cuda":
                stack.callback(lock_whole(buffer, CudaLocker()).close)
            self._free.put(buffer)

    def _stop(self, pool: ThreadPoolExecutor) -> None:
        self._free.put(None)  # for those who wait for a buffer
        pool.shutdown(cancel_futures=True)

    def _work(self, piece: Piece) -> None:
        buffer = self._free.get()
        if buffer is None:
            self._free.put(None)  # the next one should end as well
            return
        read = _Read(piece, buffer, None)
        try:
            file, at = self._files[piece.ref.path], piece.ref.offset + piece.lo
            read.data = file.read(at, piece.hi - piece.lo, buffer)
        except Exception as error:  # whatever it is, the one who waits for it should know
            read.error = error
        self._read.put(read)

    def _next(self, ref: TensorRef) -> _Read:
        try:
            return self._read.get(timeout=READ_SECONDS)
        except Empty:
            self._free.put(None)
            self._stack.pop_all()  # a read that hangs keeps file and buffer until the process ends
            raise ModelError(
                f"tensor {ref.name}: nothing could be read from {ref.path} for {READ_SECONDS:.0f} s"
            ) from None

    def _place(self, read: _Read) -> None:
        """Copy a piece to where it belongs; then its buffer is free."""
        if read.data is None:
            assert read.error is not None
            raise read.error
        ref, lo, hi = read.piece.ref, read.piece.lo, read.piece.hi
        if ref.name not in self._tensors:
            self._tensors[ref.name] = self._empty(ref)
        target = self._tensors[ref.name]
        source = torch.from_numpy(read.data)
        if ref.name not in self._raw:
            source = source.view(getattr(torch, ref.dtype))
        if source.dtype != target.dtype:
            source = source.to(self._device)  # converted there
        size = source.element_size()
        target.view(-1)[lo // size : hi // size].copy_(source)
        self._free.put(read.buffer)
        self._left[ref.name] -= hi - lo
        self._done += hi - lo
        self._progress(self._done, self._total)

    def _empty(self, ref: TensorRef) -> torch.Tensor:
        if ref.name in self._raw:
            return torch.empty(ref.nbytes, dtype=torch.uint8, device=self._device)
        dtype = torch.float32 if ref.name in self._wide else self._dtype
        return torch.empty(ref.shape, dtype=dtype, device=self._device)


def _pieces(refs: Sequence[TensorRef]) -> Iterator[Piece]:
    for ref in refs:
        for lo in range(0, ref.nbytes, PIECE):
            yield Piece(ref, lo, min(lo + PIECE, ref.nbytes))


def _open(path: str, device: torch.device, stack: ExitStack) -> File:
    try:
        file = File(path, direct=device.type == "cuda")
    except OSError as error:
        raise ModelError(f"cannot open {path}: {error.strerror}") from error
    stack.callback(file.close)
    return file
