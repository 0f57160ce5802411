"""The router's choice: softmax over all experts and the k best.

Owns: the kernel and its order, in which the best expert of a row comes first and the lower id first
where logits are equal. The meaning is `reference.softmax_topk`.

Every expert counts the experts that beat it, and those with fewer than k write themselves to that
place: one pass instead of k dependent maxima.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained


@triton.jit
def _sort_key(logits, inside):
    """float32 -> int32 of the same order: NaN below -inf, and what is not inside below NaN."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(logits != logits, -2147483647, key)
    return tl.where(inside, key, -2147483648)


@triton.jit
def _softmax_topk(
    logits,
    rows,
    weights,
    ids,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    row = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    real = row < tl.load(rows)
    value = tl.load(logits + row.to(tl.int64) * E + expert, mask=inside, other=0.0).to(tl.float32)
    exact = tl.where(inside, tl.exp(value - tl.max(tl.where(inside, value, -float("inf")), 0)), 0.0)
    share = exact / tl.sum(exact, 0)

    key = _sort_key(value, inside)
    # Summed over the first axis, which one thread holds alone.
    theirs, mine = key[:, None], key[None, :]
    beaten = (theirs > mine) | ((theirs == mine) & (expert[:, None] < expert[None, :]))
    place = tl.sum(beaten.to(tl.int32), 0)
    chosen = inside & (place < K)
    if RENORMALIZE:
        share = share / tl.sum(tl.where(chosen, share, 0.0), 0)
    at = row.to(tl.int64) * K + place
    tl.store(ids + at, tl.where(real, expert, -1), mask=chosen)
    tl.store(weights + at, tl.where(real, share, 0.0).to(weights.dtype.element_ty), mask=chosen)


def softmax_topk(
    logits: torch.Tensor,
    rows: torch.Tensor,
    k: int,
    renormalize: bool,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """The k best experts of each row, best first, and their softmax weights.

    logits [B, E] of any float dtype; rows int32 [1] on the device: how many rows are real, the
    others get ids -1 and weights 0; weights [B, k] of any float dtype, scaled to sum 1 with
    `renormalize`; ids int32 [B, k]. All contiguous, k <= E. Ids are distinct and in range even for
    a row that holds NaN, whose weights are NaN. Order is that of the logits, so that experts whose
    probability underflows to 0 still have an order.
    """
    count, experts = logits.shape
    assert k <= experts and weights.shape == ids.shape == (count, k) and ids.dtype == torch.int32
    assert logits.is_contiguous() and weights.is_contiguous() and ids.is_contiguous()
    block = triton.next_power_of_2(experts)
    _softmax_topk[(count,)](
        logits,
        rows,
        weights,
        ids,
        E=experts,
        K=k,
        BLOCK=block,
        RENORMALIZE=renormalize,
        num_warps=min(8, max(1, block // 32)),
        **chained(),
    )
