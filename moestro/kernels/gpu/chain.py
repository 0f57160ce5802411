"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

Owns: when that is possible, and what a kernel does for it. A chained kernel calls `begin` before it
touches memory; its launcher passes `**chained()`. Kernels that do neither may stand between.
Source: CUDA's programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

HOPPER = 9  # major compute capability from which the hardware can


@triton.jit
def begin(CHAINED: tl.constexpr):
    """Let the next kernel be set up, and wait until the one before has written everything."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def chained() -> dict[str, Any]:
    """Arguments of a launch that chains where the device can."""
    if not torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return {"CHAINED": False}
    if torch.cuda.get_device_capability()[0] < HOPPER:
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}
