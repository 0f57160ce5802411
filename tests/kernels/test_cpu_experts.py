"""Every variant of the expert kernels that runs here, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.kernels import cpu_experts, registry
from moestro.kernels.cpu_experts import CpuExperts, CpuShape
from tests.kernels.blobs import Blobs, assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _runnable() -> list[tuple[str, torch.dtype]]:
    return [
        (variant, dtype)
        for dtype in DTYPES
        for variant in cpu_experts.available(CpuShape(64, 64, dtype, 0))
    ] or [("none", torch.float32)]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    reason = cpu_experts.missing()
    if reason is not None:
        pytest.skip(reason)


def _compute(
    blobs: Blobs, variant: str, sizes: list[int], x: torch.Tensor, threads: int = 1, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, expectation), both in the order of the routes."""
    draw = np.random.default_rng(seed)
    routes = sum(sizes)
    source = draw.integers(0, len(x), routes, dtype=np.int32)
    target = draw.permutation(routes + 1).astype(np.int32)[:routes]
    z = torch.full((routes + 1, x.shape[1]), torch.nan, dtype=x.dtype)
    pool = CpuExperts(blobs.shape, variant)
    pool.start(threads)
    try:
        lo = np.cumsum([0, *sizes]).astype(np.int32)
        pool.compute(blobs.addresses, lo, source, target, x, z)
    finally:
        pool.stop()
    untouched = (set(range(routes + 1)) - set(target.tolist())).pop()
    assert z[untouched].isnan().all(), "a line that no route asked for"
    return z[torch.from_numpy(target).long()], blobs.expected(sizes, source, x)


@pytest.mark.parametrize(("variant", "dtype"), _runnable())
@pytest.mark.parametrize(
    ("sizes", "hidden", "inner"),
    [([1], 64, 32), ([3, 1, 0, 9], 128, 96), ([2, 17, 70], 37, 11), ([70, 8, 2], 288, 160)],
)
def test_against_the_reference(
    variant: str, dtype: torch.dtype, sizes: list[int], hidden: int, inner: int
) -> None:
    blobs = Blobs(len(sizes), hidden, inner, dtype)
    if variant not in cpu_experts.available(blobs.shape):
        pytest.skip("its tiles do not fit these shapes")
    got, expected = _compute(blobs, variant, sizes, torch.randn(5, hidden).to(dtype), threads=2)
    assert_close(got, expected)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(_runnable()),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 40),
    threads=st.integers(1, 3),
)
def test_any_shape(
    kind: tuple[str, torch.dtype], sizes: list[int], hidden: int, inner: int, threads: int
) -> None:
    variant, dtype = kind
    if variant == "amx-bf16":
        hidden, inner = 32 * (1 + hidden // 32), 32 * (1 + inner // 32)
    blobs = Blobs(len(sizes), hidden, inner, dtype)
    assert_close(*_compute(blobs, variant, sizes, torch.randn(3, hidden).to(dtype), threads))


def test_weights_may_be_narrower_than_activations() -> None:
    blobs = Blobs(2, 64, 32, torch.float32, torch.bfloat16)
    for variant in cpu_experts.available(blobs.shape):
        assert_close(*_compute(blobs, variant, [3, 1], torch.randn(4, 64)))


@pytest.mark.parametrize(("variant", "dtype"), _runnable())
def test_results_depend_on_nothing_but_the_row(variant: str, dtype: torch.dtype) -> None:
    sizes, x = [7, 2, 21], torch.randn(4, 160).to(dtype)
    blobs = Blobs(3, 160, 96, dtype)
    one, _ = _compute(blobs, variant, sizes, x)
    for threads in (2, 5):
        assert torch.equal(one, _compute(blobs, variant, sizes, x, threads)[0])
    source = np.random.default_rng(1).integers(0, 4, 30, dtype=np.int32)
    pool = CpuExperts(blobs.shape, variant)
    pool.start(1)
    owner = np.repeat([0, 1, 2], sizes)
    tiles = (variant == "amx-bf16") * sizes[2]  # which sum in another order
    for route in range(30 - tiles):
        z = torch.empty(1, 160, dtype=dtype)
        row, line = source[route : route + 1], np.zeros(1, np.int32)
        pool.compute([blobs.addresses[owner[route]]], [0, 1], row, line, x, z)
        assert torch.equal(z[0], one[route]), "it depends on the company"
    pool.stop()


def test_a_nan_stays_in_its_row_and_large_values_do_not_make_any() -> None:
    blobs = Blobs(1, 64, 32, torch.float32)
    x = torch.randn(3, 64)
    x[0, 5], x[1] = torch.nan, x[1] * 1e4
    for variant in cpu_experts.available(blobs.shape):
        pool = CpuExperts(blobs.shape, variant)
        pool.start(1)
        z, lines = torch.empty(3, 64), np.arange(3, dtype=np.int32)
        pool.compute(blobs.addresses, [0, 3], lines, lines, x, z)
        pool.stop()
        assert z[0].isnan().all()
        assert_close(z[1:], blobs.expected([2], lines[1:], x))


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CpuShape(64, 32, torch.float32, 0)
    with pytest.raises(ValueError, match="kernels 'avx512-bf16' do not run here"):
        CpuExperts(shape, "avx512-bf16")
    monkeypatch.setenv(cpu_experts.ENV, "generic")
    assert CpuExperts(shape).variant == "generic"
    pool = CpuExperts(shape)
    with pytest.raises(ValueError, match="cores \\[9999\\]"):
        pool.start(1, cores=[9999])
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        pool.start(0)
    pool.start(1)
    lines, wrong = np.zeros(1, np.int32), np.ones(1, np.int32)
    x = torch.zeros(1, 64)
    for source, target in ((wrong, lines), (lines, wrong)):
        with pytest.raises(ValueError, match="a route is not one of"):
            pool.compute([x.data_ptr()], [0, 1], source, target, x, torch.zeros(1, 64))
    pool.stop()


def test_what_check_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_experts.ENV, "generic")
    for dtype in DTYPES:
        name, _ = registry.explain("cpu", dtype, 3)["grouped_experts"]
        assert name == "native (generic, 3 threads)"
    assert not registry.serves("grouped_experts", "native", "cuda", torch.bfloat16)
    monkeypatch.setattr(cpu_experts, "_load", lambda: "not compiled: slower")
    name, why = registry.explain("cpu", torch.float32)["grouped_experts"]
    assert name == "torch reference"
    assert why.endswith("not native: not compiled: slower")
