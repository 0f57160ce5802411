"""The router's choice on the device against the reference."""

from __future__ import annotations

import pytest
import torch

from moestro.kernels import reference
from moestro.kernels.gpu import router

SIZES = [(6, 1), (6, 2), (60, 4), (128, 8), (8, 8), (200, 8)]


def choose(
    logits: torch.Tensor, k: int, *, renormalize: bool, real: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of a launch into poisoned outputs."""
    count = logits.shape[0]
    rows = torch.tensor([count if real is None else real], dtype=torch.int32, device=logits.device)
    weights = torch.full((count, k), torch.nan, device=logits.device)
    ids = torch.full((count, k), -7, dtype=torch.int32, device=logits.device)
    router.softmax_topk(logits, rows, k, renormalize, weights=weights, ids=ids)
    return weights, ids


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), SIZES)
def test_the_same_choice_as_torch(
    device: str, dtype: torch.dtype, experts: int, k: int, renormalize: bool
) -> None:
    # Distinct logits: torch promises no order among equal ones.
    steps = torch.stack([torch.randperm(experts) for _ in range(5)]) - experts // 2
    logits = (steps / 16).to(device, dtype)
    weights, ids = choose(logits, k, renormalize=renormalize)
    expected, experts_of = reference.softmax_topk(logits, k, renormalize, torch.float32)
    assert torch.equal(ids.long(), experts_of)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_weights_in_half_precision(device: str) -> None:
    logits = torch.randn(3, 16, device=device)
    weights = torch.full((3, 2), torch.nan, device=device, dtype=torch.float16)
    ids = torch.empty(3, 2, dtype=torch.int32, device=device)
    rows = torch.tensor([3], dtype=torch.int32, device=device)
    router.softmax_topk(logits, rows, 2, True, weights=weights, ids=ids)
    expected, _ = reference.softmax_topk(logits, 2, True, torch.float16)
    torch.testing.assert_close(weights, expected)


def test_equal_logits_go_to_the_lower_id(device: str) -> None:
    logits = torch.zeros(2, 60, device=device)
    logits[1] = torch.randint(0, 3, (60,), device=device).float()
    logits[0, ::2] = -0.0  # equal to 0.0
    _, ids = choose(logits, 8, renormalize=False)
    for row in range(2):
        values = logits[row].tolist()
        assert ids[row].tolist() == sorted(range(60), key=lambda e: (-values[e], e))[:8]


def test_padded_rows_choose_nothing(device: str) -> None:
    logits = torch.randn(4, 6, device=device)
    logits[2:] = torch.nan
    weights, ids = choose(logits, 2, renormalize=True, real=2)
    assert (ids[2:] == -1).all()
    assert (weights[2:] == 0).all()
    expected, experts_of = reference.softmax_topk(logits[:2], 2, True, torch.float32)
    assert torch.equal(ids[:2].long(), experts_of)
    torch.testing.assert_close(weights[:2], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_poisoned_rows_still_get_valid_ids(device: str, poison: float, everywhere: bool) -> None:
    logits = torch.randn(2, 60, device=device)
    logits[0, slice(None) if everywhere else slice(0, 57)] = poison
    clean, clean_ids = choose(logits[1:].clone(), 8, renormalize=True)
    weights, ids = choose(logits, 8, renormalize=True)
    chosen = ids[0].tolist()
    assert len(set(chosen)) == 8
    assert all(0 <= e < 60 for e in chosen)
    assert torch.equal(ids[1], clean_ids[0])
    assert torch.equal(weights[1], clean[0])
    if poison is torch.nan:
        assert weights[0].isnan().all()
