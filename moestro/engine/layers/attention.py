"""Grouped-query attention over paged KV.

Owns: projections, query/key norms, rotary embedding and the KV write of one layer. Does not own:
which blocks are used (the step says) or how attention is computed (`kernels`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moestro.engine.batch import DecodeStep, Paged, Segment
from moestro.engine.models.spec import AttentionSpec, QKNorm
from moestro.engine.weights import LayerWeights
from moestro.kernels import native
from moestro.kernels import reference as ops
from moestro.kv_cache.storage import LayerKV


class Attention:
    """One layer's attention."""

    def __init__(
        self, spec: AttentionSpec, weights: LayerWeights, eps: float, residual_scale: float = 1.0
    ) -> None:
        self.spec = spec
        self._residual_scale = residual_scale
        self._weights = weights
        self._eps = eps
        self._out = weights.out.t()
        self._rotated = spec.heads + spec.kv_heads  # rows of the projection that are rotated
        self._head_norm: torch.Tensor | None = None
        if spec.qk_norm is QKNorm.HEAD:
            assert weights.q_norm is not None and weights.k_norm is not None
            rows = (weights.q_norm.expand(spec.heads, -1), weights.k_norm.expand(spec.kv_heads, -1))
            self._head_norm = torch.cat(rows).contiguous()

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, heads + 2 * kv_heads, head_dim]: q and k rotated, v as it is."""
        spec = self.spec
        flat = F.linear(x, self._weights.qkv, self._weights.qkv_bias)
        if spec.qk_norm is QKNorm.FULL:
            flat = self._full_norm(flat)
        if spec.clip is not None:
            flat = flat.clamp_(-spec.clip, spec.clip)
        heads = flat.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        turned = heads[:, : self._rotated]
        mixed = turned
        if self._head_norm is not None:
            mixed = ops.rms_norm_heads(turned, self._head_norm, self._eps)
        turned.copy_(ops.rope(mixed, cos.to(x.dtype), sin.to(x.dtype)))
        return heads

    def decode(
        self, x: torch.Tensor, residual: torch.Tensor, step: DecodeStep, kv: LayerKV
    ) -> torch.Tensor:
        """One token a sequence: x [B, hidden] -> residual + attention, [B, hidden]."""
        spec = self.spec
        heads = self.project(x, step.cos, step.sin)
        q, new = heads[:, : spec.heads], heads[:, spec.heads :]
        kv.write(step.places, new.view(-1, 2, spec.kv_heads, spec.head_dim))
        if step.paged is not None:
            mixed = self._paged(q, step.paged, kv)
        elif len(step.groups) == 1:
            group = step.groups[0]
            mixed = ops.decode_attention(q, kv.gather(group.table), group.visible, spec.scale)
        else:
            mixed = q.new_empty(q.shape[0], spec.heads * spec.head_dim)
            for group in step.groups:
                assert group.rows is not None
                mixed[group.rows] = ops.decode_attention(
                    q[group.rows], kv.gather(group.table), group.visible, spec.scale
                )
        return self.output(mixed, residual)

    def _paged(self, q: torch.Tensor, paged: Paged, kv: LayerKV) -> torch.Tensor:
        return native.decode_attention(
            q,
            kv.rows,
            paged.table,
            paged.first,
            paged.last,
            layer=kv.layer,
            kv_heads=self.spec.kv_heads,
            block_size=kv.block_size,
            scale=self.spec.scale,
        )

    def write(self, heads: torch.Tensor, segment: Segment, kv: LayerKV, lo: int) -> None:
        """Store the KV of projected rows lo, lo + 1, ... of a segment."""
        spec, hi = self.spec, lo + heads.shape[0]
        new = heads[:, spec.heads :].view(-1, 2, spec.kv_heads, spec.head_dim)
        kv.write(segment.places[lo:hi], new)

    def output(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + out_proj(mixed), times the model's residual scale."""
        scale = self._residual_scale
        if self._weights.out_bias is not None or mixed.dtype != torch.float32:
            added = F.linear(mixed, self._weights.out, self._weights.out_bias)
            return torch.add(residual, added, alpha=scale)
        return torch.addmm(residual, mixed, self._out, alpha=scale)

    def _full_norm(self, flat: torch.Tensor) -> torch.Tensor:
        spec, weights = self.spec, self._weights
        assert weights.q_norm is not None and weights.k_norm is not None
        q = spec.heads * spec.head_dim
        kv = spec.kv_heads * spec.head_dim
        normed_q = ops.rms_norm(flat[:, :q], weights.q_norm, self._eps)
        normed_k = ops.rms_norm(flat[:, q : q + kv], weights.k_norm, self._eps)
        return torch.cat((normed_q, normed_k, flat[:, q + kv :]), -1)
