"""What lies between the QKV projection and attention, in one launch.

Owns: clamping, the norm of each query and key head, half-split rotary embedding, and the write into
the KV pool. Does not own: which place of the pool a token gets (`kv_cache.manager`). The meaning is
that of `reference.rms_norm_heads`, `reference.rope_tables` and `reference.rope`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained

# Most rows of a launch, heads of a program, warps: few rows need many small programs.
SHAPES = ((256, 4, 2), (1 << 30, 16, 4))


@triton.jit
def _clamp(x, limit):
    """As torch.clamp: NaN stays NaN."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _qk_norm_rope_write(
    qkv,
    positions,
    places,
    inverse,
    pool,
    q_norm,
    k_norm,
    q_out,
    shift,
    eps,
    limit,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    half: tl.constexpr = TURNED // 2
    partner = tl.where(at < half, at + half, tl.where(at < TURNED, at - half, at))
    place = tl.load(places + row)
    position = tl.load(positions + row).to(tl.float32)

    within = at[None, :] < DIM
    inside = (head[:, None] < QUERIES + 2 * KEYS) & within
    line = qkv + (row * (QUERIES + 2 * KEYS) + head[:, None]) * DIM
    dtype = qkv.dtype.element_ty
    own = tl.load(line + at[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(line + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if CLIP:
        own = _clamp(own, limit).to(dtype).to(tl.float32)
        other = _clamp(other, limit).to(dtype).to(tl.float32)
    plain = own
    query = head[:, None] < QUERIES
    stored = head[:, None] >= QUERIES
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        here, there = at[None, :], partner[None, :]
        w = tl.load(q_norm + here, mask=query & within, other=0.0).to(tl.float32)
        w += tl.load(k_norm + here, mask=stored & within, other=0.0).to(tl.float32)
        w_other = tl.load(q_norm + there, mask=query & within, other=0.0).to(tl.float32)
        w_other += tl.load(k_norm + there, mask=stored & within, other=0.0).to(tl.float32)
        own = ((own * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        other = ((other * scale).to(dtype).to(tl.float32) * w_other).to(dtype).to(tl.float32)

    turning = at < TURNED
    angle = position * tl.load(inverse + at % half, mask=turning, other=0.0)
    cos = tl.cos(angle)
    sin = tl.where(at < half, -tl.sin(angle), tl.sin(angle))
    if MAGNITUDE != 1.0:
        cos = cos * MAGNITUDE
        sin = sin * MAGNITUDE
    cos = cos.to(dtype).to(tl.float32)[None, :]
    sin = sin.to(dtype).to(tl.float32)[None, :]
    turned = (own * cos).to(dtype).to(tl.float32) + other * sin
    turned = tl.where(turning[None, :], turned, own)
    result = tl.where(head[:, None] < QUERIES + KEYS, turned, plain).to(dtype)

    q_at = (row * QUERIES + head[:, None]) * DIM + at[None, :]
    tl.store(q_out + q_at, result, mask=inside & query)
    kv_at = ((place + shift) * (2 * KEYS) + head[:, None] - QUERIES) * DIM + at[None, :]
    first = tl.where(place >= 0, QUERIES, QUERIES + 2 * KEYS)  # a head that is stored
    tl.store(pool + kv_at, result, mask=inside & (head[:, None] >= first))


def qk_norm_rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    inverse: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    h: int,
    g: int,
    d: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    clip: float | None,
    *,
    q_out: torch.Tensor,
    magnitude: float = 1.0,
) -> None:
    """Clamp, norm and rotate q and k; q goes to `q_out`, k and v to the pool.

    qkv [B, (h + 2g) * d]; positions int64 [B]; places int64 [B], a token's place in layer 0 of the
    pool (`kv_cache.storage`) or -1 for one that is not stored; inverse float32 [dim / 2] with
    dim <= d, even: dimensions past dim are not rotated; pool [blocks, layers, block_size, 2, g, d];
    q_norm and k_norm [d], both or neither; clip: clamp q, k and v to +-clip; q_out [B, h, d]. All
    contiguous; qkv, pool, norms and q_out of one float dtype. cos and sin, times `magnitude`, are
    rounded to it; that is a constant of the model: a kernel is compiled for each.
    """
    rows, turned = qkv.shape[0], 2 * inverse.shape[0]
    assert qkv.shape == (rows, (h + 2 * g) * d) and q_out.shape == (rows, h, d) and turned <= d
    assert qkv.is_contiguous() and q_out.is_contiguous() and pool.is_contiguous()
    assert pool.shape[3:] == (2, g, d) and 0 <= layer < pool.shape[1]
    assert (q_norm is None) == (k_norm is None)
    heads, warps = next((n, w) for most, n, w in SHAPES if rows <= most)
    _qk_norm_rope_write[(rows, triton.cdiv(h + 2 * g, heads))](
        qkv,
        positions,
        places,
        inverse,
        pool,
        inverse if q_norm is None else q_norm,
        inverse if k_norm is None else k_norm,
        q_out,
        layer * pool.shape[2],
        eps,
        0.0 if clip is None else float(clip),
        QUERIES=h,
        KEYS=g,
        DIM=d,
        TURNED=turned,
        HEADS=heads,
        BLOCK=triton.next_power_of_2(d),
        NORM=q_norm is not None,
        CLIP=clip is not None,
        MAGNITUDE=magnitude,
        num_warps=warps,
        **chained(),
    )
