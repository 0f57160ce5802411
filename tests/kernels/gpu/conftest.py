"""Runs the GPU kernels under Triton's interpreter when there is no GPU: the same tests on both."""

from __future__ import annotations

import pytest
import torch

from tests.oracle.interpreter import mend


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tensors of a kernel test live."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def interpreter(device: str) -> None:
    """The interpreter runs what these kernels need."""
    if device == "cpu":
        mend()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Fresh inputs, the same in every run."""
    torch.manual_seed(0)


# Triton's interpreter cuts float32 to bfloat16 off instead of rounding, and cannot multiply
# bfloat16 matrices, so that dtype is left to the GPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Every dtype that the kernels compute in on this machine."""
    found: torch.dtype = request.param
    return found


@pytest.fixture
def near(dtype: torch.dtype) -> float:
    """Relative and absolute difference that two roundings to `dtype` may make."""
    return {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
