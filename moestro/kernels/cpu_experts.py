"""Experts computed where they lie in host memory: a pool of native threads, called directly or
serving a device's jobs through a `Mailbox`.

Owns: the pool, its variants, the worker. Does not own: what the op means (`kernels.reference`),
where experts are (`expert_cache`), or which part of a step's misses comes here. The work is in
`kernels/csrc`; no interpreter is involved between a job and its answer.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moestro.kernels.mailbox import BUSY_NS, BYTES, ERRORS, JOBS, Mailbox

VARIANTS = ("amx-bf16", "avx512-bf16", "avx512", "avx2", "generic")  # best first
ENV = "MOESTRO_CPU_EXPERTS"  # a variant's name: use that one, or none
SPIN_US = 200  # how long a thread without work looks for more before it sleeps

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class CpuShape:
    """One model's experts in host memory. A blob is gate_up [2I, H], then, `down_offset` bytes
    from its start, down [H, I] (`expert_cache.layout`)."""

    hidden: int
    intermediate: int
    dtype: torch.dtype  # of x and z
    down_offset: int
    weights: torch.dtype | None = None  # None: as dtype

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one expert's computation reads."""
        return 3 * self.hidden * self.intermediate * (self.weights or self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class CpuStats:
    """What the pool did since it started, jobs of the mailbox and direct calls together."""

    jobs: int
    bytes: int
    busy_ns: int

    @property
    def gb_per_s(self) -> float:
        """Weights read over the time at work."""
        return self.bytes / self.busy_ns if self.busy_ns else 0.0


class CpuExperts:
    """A pool for one model's experts. `start`, then `compute` from any thread (one at a time), or
    `attach` a mailbox that the pool serves by itself, or both. `stop` ends every thread."""

    def __init__(self, shape: CpuShape, variant: str | None = None) -> None:
        """Choose how to compute: `variant`, or else the one named in the environment (ENV), or else
        the best that this processor has. ValueError when the one asked for cannot run here."""
        self.shape = shape
        self.variant = choose(shape, variant)
        self.threads = 0
        self._handle: int | None = None
        self._mailbox: Mailbox | None = None
        self._end: weakref.finalize[[int], CpuExperts] | None = None

    def start(
        self, threads: int | None = None, cores: Sequence[int] = (), spin_us: int = SPIN_US
    ) -> None:
        """Start `threads` threads (default: the cores this process may use, less two). The caller
        of `compute`, or the mailbox's worker, is one of them. Thread i is pinned to
        cores[i % len(cores)] when there are any; a caller of `compute` is never pinned."""
        assert self._handle is None, "it was started before"
        usable = os.sched_getaffinity(0)
        if wrong := sorted(set(cores) - usable):
            raise ValueError(f"cores {wrong} are not among those this process may use")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.threads = threads or max(1, len(usable) - 2)
        shape, library = self.shape, _library()
        weights = _KINDS[shape.weights or shape.dtype]
        handle = library.moestro_experts_new(
            shape.hidden,
            shape.intermediate,
            shape.down_offset,
            weights,
            _KINDS[shape.dtype],
            self.variant.encode(),
            self.threads,
            (ctypes.c_int32 * len(cores))(*cores),
            len(cores),
            spin_us,
        )
        assert handle, f"{self.variant} was chosen but does not run"
        self._handle = handle
        self._end = weakref.finalize(self, library.moestro_experts_delete, handle)

    def stop(self) -> None:
        """End the worker after the job in hand, then all threads. Nothing to do if not started."""
        if self._end is not None:
            self._end()
        self._handle = self._mailbox = self._end = None

    def compute(
        self,
        addresses: Sequence[int] | npt.NDArray[np.int64],
        lo: Sequence[int] | npt.NDArray[np.int32],
        source: npt.NDArray[np.int32],
        target: npt.NDArray[np.int32],
        x: torch.Tensor,
        z: torch.Tensor,
    ) -> None:
        """z[target[j]] = expert e on x[source[j]] for lo[e] <= j < lo[e + 1], e-th of `addresses`.

        addresses [E] of blobs; lo [E + 1]; source and target [lo[E]] int32; x [rows, H], z
        [lines, H], both contiguous in the shape's dtype. Without the interpreter's lock.
        """
        where = np.ascontiguousarray(addresses, np.int64)
        bounds = np.ascontiguousarray(lo, np.int32)
        for rows in (x, z):
            assert rows.is_contiguous() and rows.dtype == self.shape.dtype
            assert rows.shape[1] == self.shape.hidden
        assert len(bounds) == len(where) + 1
        assert len(source) == len(target) == bounds[-1]
        assert source.dtype == target.dtype == np.int32
        assert self._handle is not None, "not started"
        error = _library().moestro_experts_compute(
            self._handle,
            where.ctypes.data,
            bounds.ctypes.data,
            source.ctypes.data,
            target.ctypes.data,
            len(where),
            x.data_ptr(),
            x.shape[0],
            z.data_ptr(),
            z.shape[0],
        )
        if error:
            raise ValueError(ERRORS[error])

    def attach(self, mailbox: Mailbox, memory: Sequence[tuple[int, int]] = ()) -> None:
        """Start the worker, which serves `mailbox` until `stop`. `memory`: (address, bytes) of
        where blobs may be; a job with another address is refused. Without it any address but 0
        is believed."""
        box, shape = mailbox.shape, self.shape
        assert self._handle is not None and self._mailbox is None
        assert (box.hidden, box.dtype) == (shape.hidden, shape.dtype)
        offsets = [offset for offset, _, _ in box.offsets().values()]
        ranges = [part for pair in memory for part in pair]
        _library().moestro_experts_attach(
            self._handle,
            mailbox.buffer.data_ptr(),
            (ctypes.c_int64 * len(offsets))(*offsets),
            box.max_rows,
            box.top_k,
            box.max_experts,
            (ctypes.c_int64 * len(ranges))(*ranges),
            len(memory),
        )
        self._mailbox = mailbox

    def pause(self) -> None:
        """Have the worker finish its job and sleep; returns when it does. Threads without work
        sleep by themselves."""
        if self._mailbox is not None:
            _library().moestro_experts_pause(self._handle)

    def resume(self) -> None:
        """Have the worker look for jobs again."""
        if self._mailbox is not None:
            _library().moestro_experts_resume(self._handle)

    def stats(self) -> CpuStats:
        """Totals since `start`."""
        totals = (ctypes.c_int64 * 3)()
        if self._handle is not None:
            _library().moestro_experts_stats(self._handle, totals)
        return CpuStats(totals[JOBS], totals[BYTES], totals[BUSY_NS])


def missing(dtype: torch.dtype | None = None) -> str | None:
    """Why no native kernel serves here, or not in `dtype`; None when one does."""
    library = _load()
    if isinstance(library, str):
        return library
    return None if dtype is None or dtype in _KINDS else f"they do not know {dtype}"


def describe(dtype: torch.dtype, threads: int) -> str:
    """Which variant serves plain experts in `dtype`, for people; `missing` is None."""
    variant = choose(CpuShape(32, 32, dtype, 0))
    return f"{variant}, {threads} {'thread' if threads == 1 else 'threads'}"


def available(shape: CpuShape) -> tuple[str, ...]:
    """The variants that run on this processor for this shape, best first."""
    library = _load()
    if isinstance(library, str) or shape.dtype not in _KINDS:
        return ()
    weights = shape.weights or shape.dtype
    sizes = shape.hidden, shape.intermediate
    return tuple(
        name
        for name in VARIANTS
        if library.moestro_experts_runs(name.encode(), _KINDS[weights], _KINDS[shape.dtype], *sizes)
    )


def choose(shape: CpuShape, variant: str | None = None) -> str:
    """`variant`, or the one named in the environment, or the best. ValueError when it cannot run
    here; the message says which can."""
    reason = missing(shape.dtype)
    if reason is not None:
        raise ValueError(f"no native expert kernels: {reason}")
    able = available(shape)
    wanted = variant or os.environ.get(ENV) or able[0]
    if wanted not in able:
        raise ValueError(
            f"expert kernels {wanted!r} do not run here for {shape.dtype}; these do: "
            + ", ".join(able)
        )
    return wanted


_POINTER, _LONG, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "runs": ([_TEXT, _INT, _INT, _LONG, _LONG], _INT),
    "new": ([_LONG] * 3 + [_INT] * 2 + [_TEXT, _INT, _POINTER, _INT, _INT], _POINTER),
    "delete": ([_POINTER], None),
    "compute": ([_POINTER] * 5 + [_INT, _POINTER, _LONG, _POINTER, _LONG], _INT),
    "attach": ([_POINTER] * 3 + [_LONG] * 3 + [_POINTER, _INT], None),
    "pause": ([_POINTER], None),
    "resume": ([_POINTER], None),
    "stats": ([_POINTER, _POINTER], None),
}


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why it does not serve."""
    found = importlib.util.find_spec("moestro.kernels._experts")
    if found is None or found.origin is None:
        return (
            "not compiled, so torch multiplies in its own threads, which is slower; "
            "install again with a C++ compiler (g++)"
        )
    library = ctypes.CDLL(found.origin)
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, f"moestro_experts_{name}")
        function.argtypes, function.restype = arguments, result
    return library


def _library() -> ctypes.CDLL:
    library = _load()
    assert isinstance(library, ctypes.CDLL), library
    return library
