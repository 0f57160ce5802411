"""The router's choice: which experts a token goes to, and their weights.

Owns: the kernels and their order, in which the best expert of a row comes first and the lower id
first where they are equal. `softmax_topk` that renormalises also means `reference.topk_softmax`;
`scored_topk` means `reference.biased_topk` and `reference.grouped_softmax`.

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
def _rank(key, number):
    """How many beat each: keys int32 [N], of which the lower number wins where they are equal."""
    # Summed over the first axis, which one thread holds alone.
    theirs, mine = key[:, None], key[None, :]
    beaten = (theirs > mine) | ((theirs == mine) & (number[:, None] < number[None, :]))
    return tl.sum(beaten.to(tl.int32), 0)


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

    place = _rank(_sort_key(value, inside), expert)
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


@triton.jit
def _scored_topk(
    logits,
    bias,
    rows,
    weights,
    ids,
    scale,
    sum_add,
    sum_min,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    LONG: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    PAIRS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    # [WIDE, LONG] with a group in each line, and flat where lines do not matter.
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, WIDE)[:, None], tl.arange(0, LONG)[None, :]
    inside = (group < GROUPS) & (member < SIZE)
    expert = group * SIZE + member
    at = logits + row * (GROUPS * SIZE) + expert
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(value)
    else:
        most = tl.max(tl.max(tl.where(inside, value, -float("inf")), 1), 0)
        exact = tl.where(inside, tl.exp(value - most), 0.0)
        score = exact / tl.sum(tl.sum(exact, 1), 0)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    key = _sort_key(choice, inside)
    if KEPT < GROUPS:
        counted = tl.where(inside & (choice == choice), choice, -float("inf"))
        worth = tl.max(counted, 1)
        if PAIRS:
            first = tl.argmax(counted, 1)[:, None]
            worth += tl.max(tl.where(member == first, -float("inf"), counted), 1)
        line = tl.arange(0, WIDE)
        kept = _rank(_sort_key(worth, line < GROUPS), line) < KEPT
        key = tl.where(kept[:, None], key, -2147483648)

    place = _rank(tl.reshape(key, (WIDE * LONG,)), tl.arange(0, WIDE * LONG))
    share = tl.reshape(tl.where(inside, score, 0.0), (WIDE * LONG,))
    chosen = place < K
    if RENORMALIZE:
        total = tl.sum(tl.where(chosen, share, 0.0), 0) + sum_add
        share = share / tl.maximum(total, sum_min)
    real = row < tl.load(rows)
    share = tl.where(real, share * scale, 0.0).to(weights.dtype.element_ty)
    number = tl.reshape(tl.broadcast_to(expert, (WIDE, LONG)), (WIDE * LONG,))
    tl.store(ids + row * K + place, tl.where(real, number, -1), mask=chosen)
    tl.store(weights + row * K + place, share, mask=chosen)


def scored_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    k: int,
    renormalize: bool,
    *,
    sigmoid: bool = False,
    groups: int = 1,
    kept: int = 1,
    pairs: bool = False,
    scale: float = 1.0,
    sum_add: float = 0.0,
    sum_min: float = 0.0,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """The k experts of each row with the best score + bias, best first, and their scores.

    Scores are the sigmoid of the logits or, without `sigmoid`, their softmax. Only experts of the
    `kept` best of `groups` groups of equal size are chosen from; a group is worth its best choice
    or, with `pairs`, its two best together. With `renormalize` weights are scores divided by
    max(their sum + `sum_add`, `sum_min`); all are multiplied by `scale`. logits [B, E] of any float
    dtype; bias float32 [E]; rows, weights and ids as in `softmax_topk`. k <= E / groups * kept.
    """
    count, experts = logits.shape
    size = experts // groups
    assert size * groups == experts and 1 <= kept <= groups and k <= size * kept
    assert weights.shape == ids.shape == (count, k) and ids.dtype == torch.int32
    assert bias is None or (bias.shape == (experts,) and bias.dtype == torch.float32)
    assert logits.is_contiguous() and weights.is_contiguous() and ids.is_contiguous()
    wide, long = triton.next_power_of_2(groups), triton.next_power_of_2(size)
    _scored_topk[(count,)](
        logits,
        logits if bias is None else bias,
        rows,
        weights,
        ids,
        scale,
        sum_add,
        sum_min,
        GROUPS=groups,
        SIZE=size,
        KEPT=kept,
        K=k,
        WIDE=wide,
        LONG=long,
        SIGMOID=sigmoid,
        BIAS=bias is not None,
        PAIRS=pairs,
        RENORMALIZE=renormalize,
        num_warps=min(8, max(1, wide * long // 32)),
        **chained(),
    )


@triton.jit
def _sparse_mixer(
    logits,
    rows,
    weights,
    ids,
    reach,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < E
    value = tl.load(logits + row * E + expert, mask=inside, other=0.0).to(tl.float32)
    place = _rank(_sort_key(value, inside), expert)
    real = row < tl.load(rows)
    for nth in tl.static_range(0, 2):
        best = tl.sum(tl.where(place == nth, value, 0.0), 0)
        distant = (best - value) / tl.maximum(tl.abs(value), best) > reach  # 0 / 0 is near
        near = inside & ~distant & (place >= nth)
        share = 1.0 / tl.sum(tl.where(near, tl.exp(value - best), 0.0), 0)
        at = row * 2 + nth
        chosen = tl.sum(tl.where(place == nth, expert, 0), 0)
        tl.store(ids + at, tl.where(real, chosen, -1))
        tl.store(weights + at, tl.where(real, share, 0.0).to(weights.dtype.element_ty))


def sparse_mixer(
    logits: torch.Tensor,
    rows: torch.Tensor,
    jitter: float,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """The two best experts of each row; a weight is the softmax over those logits that are nearer
    than 2 * `jitter` of the larger magnitude, the first expert taken out before the second.

    logits [B, E] of any float dtype, E >= 2; weights [B, 2]; ids int32 [B, 2]; rows as in
    `softmax_topk`.
    """
    count, experts = logits.shape
    assert experts >= 2 and weights.shape == ids.shape == (count, 2) and ids.dtype == torch.int32
    assert logits.is_contiguous() and weights.is_contiguous() and ids.is_contiguous()
    block = triton.next_power_of_2(experts)
    _sparse_mixer[(count,)](
        logits,
        rows,
        weights,
        ids,
        2 * jitter,
        E=experts,
        BLOCK=block,
        num_warps=min(8, max(1, block // 32)),
        **chained(),
    )
