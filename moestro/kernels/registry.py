"""Which kernel serves which op on a device, and why the others do not.

Owns: the table of ops and candidates, best first. The first candidate whose predicate holds is
taken; the reference comes last and fits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation. `fits(device)` returns the reason why not, or None when it fits."""

    name: str
    fits: Callable[[str], str | None]


def _anywhere(device: str) -> str | None:
    return None


_REFERENCE = Candidate("torch reference", _anywhere)

OPS: dict[str, tuple[Candidate, ...]] = {
    "rms_norm": (_REFERENCE,),
    "rope": (_REFERENCE,),
    "softmax_topk": (_REFERENCE,),
    "decode_attention": (_REFERENCE,),
    "sweep_attention": (_REFERENCE,),
    "grouped_experts": (_REFERENCE,),
    "swiglu": (_REFERENCE,),
    "sampling": (_REFERENCE,),
}


def explain(device: str) -> dict[str, tuple[str, str]]:
    """op -> (name of the kernel that serves it on `device`, why)."""
    return {op: choose(candidates, device) for op, candidates in OPS.items()}


def choose(candidates: tuple[Candidate, ...], device: str) -> tuple[str, str]:
    """Name of the first candidate that fits, and why the ones before it do not."""
    refused: list[str] = []
    for candidate in candidates:
        reason = candidate.fits(device)
        if reason is None:
            why = "; ".join(refused) or ("first choice" if len(candidates) > 1 else "the only one")
            return candidate.name, why
        refused.append(f"not {candidate.name}: {reason}")
    raise AssertionError("the reference fits everywhere")
