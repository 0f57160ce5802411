"""Which kernel serves which op on a device, and why the others do not.

Owns: the table of ops and candidates, best first. The first candidate whose predicate holds is
taken; the reference comes last and fits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moestro.kernels import cpu_experts, native


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation. `fits(device, dtype)` returns why it does not, or None when it does;
    `detail(dtype, threads)` what more there is to say about it."""

    name: str
    fits: Callable[[str, torch.dtype], str | None]
    detail: Callable[[torch.dtype, int], str] | None = None


def _anywhere(device: str, dtype: torch.dtype) -> str | None:
    return None


def _native(device: str, dtype: torch.dtype) -> str | None:
    if device != "cpu":
        return "it is for the CPU"
    return f"it computes in float32, not in {dtype}" if dtype != torch.float32 else native.missing()


def _native_experts(device: str, dtype: torch.dtype) -> str | None:
    return cpu_experts.missing(dtype) if device == "cpu" else "it is for the CPU"


def _triton(device: str, dtype: torch.dtype) -> str | None:
    if device != "cuda":
        return "it is for CUDA devices"
    return None if dtype in _HALVES or dtype == torch.float32 else f"it does not know {dtype}"


def _flashinfer(device: str, dtype: torch.dtype) -> str | None:
    if device != "cuda":
        return "it is for CUDA devices"
    return "slower in decode steps where both were measured (docs/performance.md)"


_HALVES = (torch.bfloat16, torch.float16)
_REFERENCE = Candidate("torch reference", _anywhere)
_NATIVE = Candidate("native", _native)
_NATIVE_EXPERTS = Candidate("native", _native_experts, cpu_experts.describe)
_TRITON = Candidate("triton", _triton)
_FLASHINFER = Candidate("flashinfer", _flashinfer)

OPS: dict[str, tuple[Candidate, ...]] = {
    "rms_norm": (_TRITON, _REFERENCE),
    "rope": (_TRITON, _REFERENCE),
    "softmax_topk": (_TRITON, _REFERENCE),
    "decode_attention": (_FLASHINFER, _TRITON, _NATIVE, _REFERENCE),
    "sweep_attention": (_TRITON, _REFERENCE),
    "latent_attention": (_REFERENCE,),
    "grouped_experts": (_TRITON, _NATIVE_EXPERTS, _REFERENCE),
    "swiglu": (_TRITON, _REFERENCE),
    "sampling": (_TRITON, _REFERENCE),
}


def explain(
    device: str, dtype: torch.dtype, threads: int = 1, packed: str | None = None
) -> dict[str, tuple[str, str]]:
    """op -> (name of the kernel that serves it on `device` in `dtype`, why). `threads`: of the CPU,
    that compute; `packed`: the format of experts that are not plain."""
    found = {}
    for op, candidates in OPS.items():
        name, why = choose(candidates, device, dtype)
        detail = next(one.detail for one in candidates if one.name == name)
        found[op] = f"{name} ({detail(dtype, threads)})" if detail else name, why
    if packed is not None and device == "cpu":
        found["grouped_experts"] = _REFERENCE.name, f"not native: it does not read {packed}"
    return found


def serves(op: str, name: str, device: str, dtype: torch.dtype) -> bool:
    """Whether the candidate called `name` is the one that serves `op`."""
    return choose(OPS[op], device, dtype)[0] == name


def choose(candidates: tuple[Candidate, ...], device: str, dtype: torch.dtype) -> tuple[str, str]:
    """Name of the first candidate that fits, and why the ones before it do not."""
    refused: list[str] = []
    for candidate in candidates:
        reason = candidate.fits(device, dtype)
        if reason is None:
            why = "; ".join(refused) or ("first choice" if len(candidates) > 1 else "the only one")
            return candidate.name, why
        refused.append(f"not {candidate.name}: {reason}")
    raise AssertionError("the reference fits everywhere")
