"""The router's choice on the device against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moestro.engine.layers.moe import _chosen as chosen
from moestro.engine.layers.moe import _scores as score
from moestro.engine.models.router import BiasedTopK, Scores
from moestro.engine.models.spec import MoESpec, RouterDtype
from moestro.kernels import reference
from moestro.kernels.gpu import router

no_numbers = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
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


@no_numbers
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


def routed(
    launch: Callable[..., None], logits: torch.Tensor, k: int, *args: Any, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of all rows but the last, which is padding and holds NaN."""
    logits = torch.cat((logits, logits[:1] * torch.nan))
    rows = torch.tensor([len(logits) - 1], dtype=torch.int32, device=logits.device)
    weights = torch.full((len(logits), k), torch.nan, device=logits.device)
    ids = torch.full((len(logits), k), -7, dtype=torch.int32, device=logits.device)
    before = (rows,) if launch is router.sparse_mixer else (args[0], rows, k)
    launch(logits, *before, *args[1:], weights=weights, ids=ids, **more)
    assert (ids[-1] == -1).all()
    assert (weights[-1] == 0).all()
    return weights[:-1], ids[:-1].long()


def distinct(count: int, experts: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Logits of which no two of a row are near."""
    steps = torch.stack([torch.randperm(experts) for _ in range(count)]) - experts // 2
    return (steps * 4 / experts).to(device, dtype)


@no_numbers
@pytest.mark.parametrize("scores", Scores)
@pytest.mark.parametrize(
    ("experts", "k", "groups", "kept"), [(60, 4, 1, 1), (8, 3, 4, 2), (60, 6, 3, 2), (256, 8, 8, 4)]
)
def test_chosen_by_score_and_bias(
    device: str, dtype: torch.dtype, scores: Scores, experts: int, k: int, groups: int, kept: int
) -> None:
    logits = distinct(5, experts, device, dtype)
    bias = torch.randn(experts, device=device) * 0.1
    renormalize = groups != 3
    spec = BiasedTopK(scores, groups, kept, 2.5, 0.01, 0.02)
    moe = MoESpec(experts, k, 8, renormalize, RouterDtype.FLOAT32, spec)
    found = score(spec, logits)
    want_ids = reference.biased_topk(found, bias, k, groups, kept)
    want = chosen(moe, spec, found, want_ids)
    weights, ids = routed(
        router.scored_topk, logits, k, bias, renormalize,
        sigmoid=scores is Scores.SIGMOID, groups=groups, kept=kept, pairs=True,
        scale=2.5, sum_add=0.01, sum_min=0.02,
    )  # fmt: skip
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)


@no_numbers
@pytest.mark.parametrize(("experts", "k", "groups", "kept"), [(64, 6, 1, 1), (160, 6, 8, 3)])
def test_groups_worth_their_best(device: str, experts: int, k: int, groups: int, kept: int) -> None:
    logits = distinct(5, experts, device, torch.float32)
    want, want_ids = reference.grouped_softmax(logits, k, groups, kept)
    weights, ids = routed(
        router.scored_topk, logits, k, None, False, groups=groups, kept=kept, scale=16.0
    )
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, 16 * want, rtol=1e-5, atol=1e-7)


def test_the_least_sum_of_weights_counts(device: str) -> None:
    logits = torch.full((1, 8), -30.0, device=device)
    logits[0, 3:5] = torch.tensor([-20.0, -21.0])
    bias = torch.zeros(8, device=device)
    weights, ids = routed(router.scored_topk, logits, 2, bias, True, sigmoid=True, sum_min=0.5)
    assert ids.tolist() == [[3, 4]]
    torch.testing.assert_close(weights, logits[:, 3:5].sigmoid() / 0.5)


@no_numbers
@pytest.mark.parametrize("groups", [1, 4])
def test_scores_that_are_no_numbers_still_give_valid_ids(device: str, groups: int) -> None:
    logits = torch.randn(2, 60, device=device)
    logits[0, :57] = torch.nan
    bias = torch.zeros(60, device=device)
    kept = max(1, groups // 2)
    _, ids = routed(
        router.scored_topk, logits, 8, bias, True, sigmoid=True, groups=groups, kept=kept
    )
    chosen = ids[0].tolist()
    assert len(set(chosen)) == 8
    assert all(0 <= e < 60 for e in chosen)


@no_numbers
@pytest.mark.parametrize("experts", [2, 16, 60])
@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparse_mixer(device: str, experts: int, jitter: float) -> None:
    logits = torch.randn(6, experts, device=device) * torch.tensor([[0.1]] * 3 + [[3.0]] * 3)
    logits[1] = -logits[1].abs() - 0.5  # the best is below zero
    logits[2] = 0.0
    logits[2, 1] = -1.0
    want, want_ids = reference.sparse_mixer(logits, jitter, torch.float32)
    weights, ids = routed(router.sparse_mixer, logits, 2, None, jitter)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)
