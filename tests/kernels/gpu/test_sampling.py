"""Device sampling against the engine's sampler: same seed, same token."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import numpy as np
import torch

from moestro.engine import sampler as oracle
from moestro.kernels.gpu import sampling as kernel
from moestro.types import SamplingParams

PLAIN = SamplingParams(max_tokens=1, temperature=1.0)
VOCAB = 5000  # two chunks


def bits(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def rows_of(params: list[SamplingParams], positions: list[int], device: str) -> kernel.Rows:
    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return kernel.Rows(
        column([p.temperature for p in params], torch.float32),
        column([p.top_k for p in params], torch.int32),
        column([p.top_p for p in params], torch.float64),
        column([p.min_p for p in params], torch.float64),
        column([bits(p.seed) for p in params], torch.int64),
        column(positions, torch.int64),
    )


def run(
    logits: torch.Tensor, params: list[SamplingParams], top: int | None, device: str
) -> tuple[list[int], list[bool]]:
    batch, vocab = logits.shape
    rows = rows_of(params, list(range(batch)), device)
    tokens = torch.full((batch,), -7, dtype=torch.int64, device=device)
    finite = torch.zeros(batch, dtype=torch.bool, device=device)
    scratch = kernel.Scratch.empty(batch, vocab, device)
    scratch.best.fill_(float("nan"))
    scratch.mass.fill_(float("nan"))
    kernel.sample(logits.to(device), rows, top, scratch=scratch, tokens=tokens, finite=finite)
    return tokens.tolist(), finite.tolist()


def expected(logits: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    tokens = []
    for row, p in enumerate(params):
        number = oracle.uniform(p.seed, row)
        tokens += oracle.draw(logits[row : row + 1], [p], [number])
    return tokens


def seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    return [replace(params, seed=int(s)) for s in torch.randint(2**62, (count,)).tolist()]


def test_uniform_is_the_engines(device: str) -> None:
    known = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    numbers = known + [int(s) * 3 for s in torch.randint(2**62, (400,)).tolist()]
    places = torch.randint(2**31, (len(numbers),))
    places[::2] = torch.arange(len(places[::2]))
    found = torch.full((len(numbers),), float("nan"), dtype=torch.float64, device=device)
    signed = torch.tensor([bits(n) for n in numbers], dtype=torch.int64, device=device)
    kernel.uniform(signed, places.to(device), out=found)
    pairs = zip(numbers, places.tolist(), strict=True)
    assert found.tolist() == [oracle.uniform(n, p) for n, p in pairs]


@pytest.mark.parametrize(
    ("params", "top"),
    [
        (PLAIN, 0),
        (replace(PLAIN, temperature=0.3), 0),
        (replace(PLAIN, min_p=0.05), 0),
        (replace(PLAIN, top_k=20), 20),
        (replace(PLAIN, top_k=20), None),
        (replace(PLAIN, top_k=9000), None),
        (replace(PLAIN, top_p=0.9), None),
        (replace(PLAIN, top_k=40, top_p=0.7), 64),
        (replace(PLAIN, top_k=50, top_p=0.8, min_p=0.02, temperature=1.7), 50),
        (replace(PLAIN, top_k=50, top_p=0.8, min_p=0.02, temperature=1.7), None),
    ],
)
def test_same_token_as_the_engine(device: str, params: SamplingParams, top: int | None) -> None:
    drawn = seeds(params, 5)
    logits = torch.randn(5, VOCAB) * 3
    assert run(logits, drawn, top, device)[0] == expected(logits, drawn)


@pytest.mark.parametrize("top", [30, None])
def test_ties_at_the_cut_are_kept_by_id(device: str, top: int | None) -> None:
    """Logits of few values: without order among equals the tokens would differ."""
    drawn = [*seeds(replace(PLAIN, top_k=30), 3), *seeds(replace(PLAIN, top_k=7, top_p=0.6), 3)]
    logits = torch.randint(0, 4, (6, VOCAB)).float()
    logits[:, VOCAB // 2] = 4.0
    assert run(logits, drawn, top, device)[0] == expected(logits, drawn)


def test_rows_keep_to_their_own_parameters(device: str) -> None:
    kinds = [
        PLAIN,
        replace(PLAIN, temperature=0.0),
        replace(PLAIN, top_k=1),
        replace(PLAIN, top_k=25, top_p=0.9, temperature=2.0),
        replace(PLAIN, min_p=0.1),
    ]
    drawn = [replace(p, seed=i) for i, p in enumerate(kinds * 2)]
    logits = torch.randn(10, 300)
    hot = [p if p.temperature else replace(p, temperature=1.0, top_k=1) for p in drawn]
    assert run(logits, drawn, 25, device) == (expected(logits, hot), [True] * 10)


def test_greedy_takes_the_lowest_id(device: str) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [4999, 4500, 17]] = 3.0
    logits[1, [4999, 4500]] = 3.0
    greedy = replace(PLAIN, temperature=0.0)
    assert run(logits, [greedy] * 2, 0, device)[0] == [17, 4500]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top", [0, None])
def test_what_is_not_finite_is_told(device: str, temperature: float, top: int | None) -> None:
    logits = torch.randn(5, VOCAB)
    logits[0, 4321] = float("nan")
    logits[1, 7] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("-inf")
    logits[3, 4400] = -5.0
    p = replace(PLAIN, temperature=temperature, top_k=0 if top == 0 else 3)
    tokens, finite = run(logits, [p] * 5, top, device)
    assert finite == [False, False, False, True, True]
    assert tokens[:4] == [0, 0, 0, 4400]


@pytest.mark.parametrize("vocab", [VOCAB, 4096, 37])
def test_masks_fall_on_their_rows(device: str, vocab: int) -> None:
    logits = torch.randn(6, vocab)
    logits[1, 3], logits[4, 5] = float("nan"), float("inf")
    allowed = torch.rand(3, vocab) < 0.3
    allowed[:, 3:6] = False
    rows = [4, 0, 1]
    padded = np.ones((3, -(-vocab // 32) * 32), np.uint8)  # what is behind the end is nobody's
    padded[:, :vocab] = allowed.numpy()
    bits = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    expected = logits.clone()
    for row, mine in zip(rows, allowed, strict=True):
        expected[row, ~mine & (logits[row] < float("inf"))] = float("-inf")
    at = torch.tensor(rows, dtype=torch.int32, device=device)
    found = kernel.mask(logits.to(device), at, bits.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_sampling_behind_a_mask_is_the_engines(device: str) -> None:
    ways = [PLAIN, replace(PLAIN, top_k=20), replace(PLAIN, top_p=0.8), replace(PLAIN, min_p=0.1)]
    drawn = [replace(p, seed=i) for i, p in enumerate(ways * 2)]
    logits = torch.randn(8, VOCAB)
    logits[:4, torch.rand(VOCAB) > 0.001] = float("-inf")
    logits[5, 1:] = float("-inf")
    assert run(logits, drawn, None, device) == (expected(logits, drawn), [True] * 8)


def test_logprobs(device: str) -> None:
    logits = torch.randn(3, 200)
    tokens = torch.tensor([5, 0, 199])
    chosen, values, ids = kernel.logprobs(logits.to(device), tokens.to(device), 4)
    full = torch.log_softmax(logits, -1)
    torch.testing.assert_close(chosen.cpu(), full.gather(1, tokens[:, None])[:, 0])
    top = full.topk(4, -1)
    torch.testing.assert_close(values.cpu(), top.values)
    assert ids.tolist() == top.indices.tolist()
    assert kernel.logprobs(logits.to(device), tokens.to(device), 0)[1].shape == (3, 0)
