"""From logits to tokens on the device, each row by its own parameters, without synchronising.

Owns: masks, filters, random numbers, the draw and log-probabilities. Does not own: bias, bans and
penalties, which are applied to the logits before. Meaning: `uniform`, `draw` and `_filter` of
`engine.sampler`: the same seed and position give the same token, up to rounding of the last bit.

The vocabulary is cut into chunks. One kernel finds each chunk's best token, one its probability
mass, and one program a row walks the masses to the token. What top-k and top-p keep is the head of
the row sorted by (logit, descending; id, ascending), so it is told by two numbers: the lowest logit
kept, and how many tokens of just that logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained

_CHUNK = 4096  # tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """Parameters of B rows, on the device."""

    temperature: torch.Tensor  # float32 [B]; 0 takes the best token, the lowest id if several
    top_k: torch.Tensor  # int32 [B]; 0 keeps all
    top_p: torch.Tensor  # float64 [B]; 1 keeps all
    min_p: torch.Tensor  # float64 [B]; 0 keeps all
    seed: torch.Tensor  # int64 [B], the bits of an unsigned number
    position: torch.Tensor  # int64 [B], number of outputs before this one


@dataclass(frozen=True, slots=True)
class Scratch:
    """What `sample` keeps between its kernels."""

    best: torch.Tensor  # float32 [B, chunks]
    best_at: torch.Tensor  # int32 [B, chunks]
    mass: torch.Tensor  # float64 [B, chunks], of the tokens above the cut
    ties: torch.Tensor  # int32 [B, chunks], tokens at the cut

    @staticmethod
    def empty(rows: int, vocab: int, device: torch.device | str) -> Scratch:
        """Buffers for exactly these sizes."""

        def buffer(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, triton.cdiv(vocab, _CHUNK), dtype=dtype, device=device)

        return Scratch(
            buffer(torch.float32), buffer(torch.int32), buffer(torch.float64), buffer(torch.int32)
        )


def sample(
    logits: torch.Tensor,
    rows: Rows,
    top: int | None,
    *,
    scratch: Scratch,
    tokens: torch.Tensor,
    finite: torch.Tensor,
) -> torch.Tensor:
    """One token a row by inverse cumulative probability, in float64 as `engine.sampler.draw`.

    logits float32 [B, V], rows contiguous. `top` is what the host knows of top_k and top_p: 0 if no
    row has either, n if every row that has one has 1 <= top_k <= n, None for anything (which sorts
    whole rows). tokens int64 [B]; finite bool [B], False where the best logit is infinite or a
    logit is NaN, and the token is then 0. With `top` 0 nothing is allocated. Returns `tokens`.
    """
    batch, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert scratch.best.shape == (batch, chunks)
    wide = triton.next_power_of_2(chunks)
    stride = logits.stride(0)
    cut = None if top == 0 else _cut(logits, rows, vocab if top is None else min(top, vocab))
    grid = (chunks, batch)
    _best_kernel[grid](
        logits, scratch.best, scratch.best_at, stride, vocab, C=_CHUNK, num_warps=8, **chained()
    )
    _mass_kernel[grid](
        logits,
        scratch.best,
        rows.temperature,
        rows.min_p,
        *(cut or (scratch.best, scratch.ties)),
        scratch.mass,
        scratch.ties,
        stride,
        vocab,
        chunks,
        HAS_CUT=cut is not None,
        C=_CHUNK,
        CHUNKS=wide,
        num_warps=8,
        **chained(),
    )
    _draw_kernel[(batch,)](
        logits,
        scratch.best,
        scratch.best_at,
        rows.temperature,
        rows.min_p,
        *(cut or (scratch.best, scratch.ties)),
        scratch.mass,
        scratch.ties,
        rows.seed,
        rows.position,
        tokens,
        finite,
        stride,
        vocab,
        chunks,
        HAS_CUT=cut is not None,
        C=_CHUNK,
        CHUNKS=wide,
        num_warps=8,
        **chained(),
    )
    return tokens


def uniform(seed: torch.Tensor, position: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """`engine.sampler.uniform` of each pair: int64 [B] (bits of a uint64), int64 [B] -> float64 [B]
    in (0, 1), SplitMix64 (Steele 2014). Returns `out`."""
    count = seed.numel()
    _uniform_kernel[(triton.cdiv(count, 128),)](seed, position, out, count, C=128)
    return out


def mask(logits: torch.Tensor, at: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Set to -inf, in place, what some rows of logits float32 [B, V] must not choose.

    at int32 [n], the rows; bits int32 [n, ceil(V / 32)]: bit t % 32 of word t // 32 is set where
    token t stays. Logits that are NaN or +inf stay too, so that `sample` sees them.
    """
    vocab = logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert bits.shape == (len(at), triton.cdiv(vocab, 32)) and bits.is_contiguous()
    grid = (triton.cdiv(vocab, _CHUNK), len(at))
    _mask_kernel[grid](logits, at, bits, logits.stride(0), vocab, C=_CHUNK, num_warps=8)
    return logits


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities at temperature 1 from logits float32 [B, V] before any edit.

    tokens int64 [B]. Returns that of each token [B], the n best [B, n] and their ids int64 [B, n].
    """
    norm = torch.logsumexp(logits, -1, keepdim=True)
    values, ids = logits.topk(min(n, logits.shape[1]), -1)
    return (logits.gather(1, tokens[:, None]) - norm)[:, 0], values - norm, ids


def _cut(logits: torch.Tensor, rows: Rows, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest logit kept by top_k and top_p (and min_p before them), and how many tokens of it.

    Looks at the `most` best logits of each row. float32 [B], int32 [B].
    """
    ranked = logits.topk(most, -1).values if most < logits.shape[1] else _sorted(logits)
    heat = torch.where(rows.temperature > 0, rows.temperature, 1.0).double()[:, None]
    mass = ((ranked - ranked[:, :1]).double() / heat).exp()
    mass = torch.where(mass < rows.min_p[:, None], 0.0, mass)
    rank = torch.arange(most, device=logits.device)
    mass = torch.where((rank < rows.top_k[:, None]) | (rows.top_k[:, None] == 0), mass, 0.0)
    before = mass.cumsum(-1) - mass
    kept = (before < rows.top_p[:, None] * mass.sum(-1, keepdim=True)) & (mass > 0)
    last = (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    lowest = ranked.gather(1, last)
    ties = last + 1 - (ranked > lowest).sum(-1, keepdim=True)
    filters = (rows.top_k > 0) | (rows.top_p < 1)
    return (
        torch.where(filters, lowest[:, 0], float("-inf")),
        torch.where(filters, ties[:, 0], 0).to(torch.int32),
    )


def _sorted(logits: torch.Tensor) -> torch.Tensor:
    return logits.sort(-1, descending=True).values


@triton.jit
def _mask_kernel(
    logits_ptr: tl.tensor,
    at_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    C: tl.constexpr,
) -> None:
    token = tl.program_id(0) * C + tl.arange(0, C)
    mine = tl.program_id(1)
    real = token < vocab
    words = (vocab + 31) // 32
    word = tl.load(bits_ptr + mine * words + token // 32, mask=real, other=-1)
    spots = logits_ptr + tl.load(at_ptr + mine).to(tl.int64) * stride + token
    x = tl.load(spots, mask=real, other=0.0)
    stays = ((word >> (token % 32)) & 1) != 0
    tl.store(spots, float("-inf"), mask=real & (x < float("inf")) & (stays == 0))


@triton.jit
def _best_kernel(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_at_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    C: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Best logit and its lowest id in a chunk; NaN if there is one."""
    begin(CHAINED)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    token = chunk * C + tl.arange(0, C)
    spots = logits_ptr + row.to(tl.int64) * stride + token
    x = tl.load(spots, mask=token < vocab, other=float("-inf"))
    best = tl.max(x, 0)
    at = tl.min(tl.where((x == best) & (token < vocab), token, vocab), 0)
    bad = tl.sum((x != x).to(tl.int32), 0)
    spot = row * tl.num_programs(0) + chunk
    tl.store(best_ptr + spot, tl.where(bad > 0, float("nan"), best))
    tl.store(best_at_ptr + spot, at)


@triton.jit
def _row_best(
    best_ptr: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A row's best logit, whether it is a finite number and no NaN is about, and its chunk."""
    chunk = tl.arange(0, CHUNKS)
    found = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    bad = tl.sum((found != found).to(tl.int32), 0)
    best = tl.max(tl.where(found == found, found, float("-inf")), 0)
    fine = (bad == 0) & (best > float("-inf")) & (best < float("inf"))
    return best, fine, tl.min(tl.where(found == best, chunk, CHUNKS - 1), 0)


@triton.jit
def _masses(x: tl.tensor, best: tl.tensor, heat: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Probabilities relative to the best token's, float64, zero below min_p."""
    mass = tl.exp((x - best).to(tl.float64) / heat.to(tl.float64))
    return tl.where(mass < min_p, 0.0, mass)


@triton.jit
def _mass_kernel(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    heat_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    cut_ties_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    ties_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    HAS_CUT: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Mass of a chunk's tokens above the cut, and how many are at it."""
    begin(CHAINED)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    heat = tl.load(heat_ptr + row)
    best, fine, _ = _row_best(best_ptr, row, chunks, CHUNKS)
    if (heat > 0) & fine:
        token = chunk * C + tl.arange(0, C)
        spots = logits_ptr + row.to(tl.int64) * stride + token
        x = tl.load(spots, mask=token < vocab, other=float("-inf"))
        mass = _masses(x, best, heat, tl.load(min_p_ptr + row))
        spot = row * chunks + chunk
        if HAS_CUT:
            cut = tl.load(cut_ptr + row)
            tl.store(mass_ptr + spot, tl.sum(tl.where(x > cut, mass, 0.0), 0))
            tl.store(ties_ptr + spot, tl.sum((x == cut).to(tl.int32), 0))
        else:
            tl.store(mass_ptr + spot, tl.sum(mass, 0))


@triton.jit
def _draw_kernel(
    logits_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_at_ptr: tl.tensor,
    heat_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    cut_ptr: tl.tensor,
    cut_ties_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    ties_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    finite_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    chunks: tl.tensor,
    HAS_CUT: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    begin(CHAINED)
    row = tl.program_id(0)
    heat = tl.load(heat_ptr + row)
    best, fine, best_chunk = _row_best(best_ptr, row, chunks, CHUNKS)
    tl.store(finite_ptr + row, fine)
    if (heat > 0) & fine:
        min_p = tl.load(min_p_ptr + row)
        chunk = tl.arange(0, CHUNKS)
        real = chunk < chunks
        mass = tl.load(mass_ptr + row * chunks + chunk, mask=real, other=0.0)
        tie_base = tl.zeros([CHUNKS], tl.int32)
        kept = 0
        if HAS_CUT:
            cut = tl.load(cut_ptr + row)
            kept = tl.load(cut_ties_ptr + row)
            ties = tl.load(ties_ptr + row * chunks + chunk, mask=real, other=0)
            tie_base = tl.cumsum(ties, 0) - ties
            mine = tl.minimum(tl.maximum(kept - tie_base, 0), ties)
            mass += mine.to(tl.float64) * _masses(cut, best, heat, min_p)
        upto = tl.cumsum(mass, 0)
        total = tl.sum(tl.where(chunk == CHUNKS - 1, upto, 0.0), 0)
        target = total * _random(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        # Rounding must not lead to a chunk or token without mass.
        here = tl.sum((upto <= target).to(tl.int32), 0)
        here = tl.minimum(here, tl.max(tl.where(mass > 0.0, chunk, 0), 0))
        base = tl.sum(tl.where(chunk == here, upto - mass, 0.0), 0)

        token = here * C + tl.arange(0, C)
        spots = logits_ptr + row.to(tl.int64) * stride + token
        x = tl.load(spots, mask=token < vocab, other=float("-inf"))
        weight = _masses(x, best, heat, min_p)
        if HAS_CUT:
            tie = (x == cut).to(tl.int32)
            earlier = tl.cumsum(tie, 0) - tie + tl.sum(tl.where(chunk == here, tie_base, 0), 0)
            weight = tl.where((x > cut) | ((tie > 0) & (earlier < kept)), weight, 0.0)
        passed = tl.sum((base + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
        chosen = tl.minimum(here * C + passed, tl.max(tl.where(weight > 0.0, token, 0), 0))
        tl.store(tokens_ptr + row, chosen.to(tl.int64))
    else:
        chosen = tl.load(best_at_ptr + row * chunks + best_chunk)
        tl.store(tokens_ptr + row, tl.where(fine, chosen, 0).to(tl.int64))


@triton.jit
def _random(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    z = seed.to(tl.uint64) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z >> 11).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)


@triton.jit
def _uniform_kernel(
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    C: tl.constexpr,
) -> None:
    at = tl.program_id(0) * C + tl.arange(0, C)
    seed = tl.load(seed_ptr + at, mask=at < count, other=0)
    position = tl.load(position_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + at, _random(seed, position), mask=at < count)
