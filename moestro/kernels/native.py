"""A decode step's attention on the CPU, compiled with the package where a C++ compiler is at hand.

Owns: finding the library and calling it with tensors. Does not own: what the op means
(`kernels.reference`) or when it serves (`kernels.registry`). Float32 only.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

import torch

_POINTER, _INT, _COUNT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "moestro_decode_attention": [_POINTER] * 6 + [_INT] * 7 + [ctypes.c_float, _COUNT],
}


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why it does not serve."""
    found = importlib.util.find_spec("moestro.kernels._native")
    if found is None or found.origin is None:
        return "not compiled: install again with a C++ compiler (g++) for a faster decode step"
    library = ctypes.CDLL(found.origin)
    if not library.moestro_native_runs():
        return "the processor has no AVX2"
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def missing() -> str | None:
    """Why this kernel does not serve here; None when it does."""
    library = _load()
    return library if isinstance(library, str) else None


def decode_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    *,
    layer: int,
    kv_heads: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """One query a sequence over its own KV, read from where it lies.

    q [B, h, d] float32; rows, the pool as [blocks * layers, block_size * 2 * g * d]; table [B, n]
    int64, rows of layer 0; first and last [B] int64, the positions seen, both included. Returns
    [B, h * d]; a softmax in parts as in FlashAttention (arXiv 2205.14135).
    """
    batch, heads, dim = q.shape
    q, table = q.contiguous(), table.contiguous()
    out = q.new_empty(batch, heads * dim)
    pointers = [t.data_ptr() for t in (q, rows, table, first, last, out)]
    sizes = batch, table.shape[1], layer, heads, kv_heads, dim, block_size
    _library().moestro_decode_attention(*pointers, *sizes, scale, torch.get_num_threads())
    return out


def _library() -> ctypes.CDLL:
    library = _load()
    assert isinstance(library, ctypes.CDLL), library
    return library
