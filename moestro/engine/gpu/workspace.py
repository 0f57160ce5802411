"""Device memory that a sweep computes in.

Owns: its tensors, and how many bytes they take.
"""

from __future__ import annotations

import torch

from moestro.engine.gpu.mlp import Mlp
from moestro.engine.models.spec import ModelSpec, RouterDtype
from moestro.kernels.gpu.grouping import Routes


class Workspace:
    """Activations of up to `tokens` tokens, the widest layer at a time."""

    def __init__(self, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device):
        attention, moe = spec.attention, spec.moe
        heads = attention.heads + 2 * attention.kv_heads
        routes = tokens * moe.top_k

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.tokens = tokens
        self.residual = empty(tokens, spec.hidden)
        self.normed = empty(tokens, spec.hidden)
        self.qkv = empty(tokens, heads * attention.head_dim)
        self.q = empty(tokens, attention.heads, attention.head_dim)
        self.mixed = empty(tokens, attention.heads * attention.head_dim)
        self.added = empty(tokens, spec.hidden)
        self.routing = empty(tokens, moe.experts, dtype=torch.float32 if moe.wide else dtype)
        share = torch.float32 if moe.router_dtype is RouterDtype.FLOAT32 else dtype
        self.weights = empty(routes, dtype=share)
        self.ids = empty(routes, dtype=torch.int32)
        self.inner = empty(routes, moe.intermediate)
        self.outer = empty(routes, spec.hidden)
        self.mlp = Mlp(spec, tokens, dtype, device)
        self.routes = Routes.empty(routes, moe.experts, device)

    @staticmethod
    def nbytes(spec: ModelSpec, tokens: int, size: int) -> int:
        """What `Workspace` takes for elements of `size` bytes."""
        attention, moe = spec.attention, spec.moe
        heads = 3 * attention.heads + 2 * attention.kv_heads
        width = (3 * spec.hidden + heads * attention.head_dim + moe.experts) * size
        if moe.wide:  # logits, and what they are computed from
            width += (spec.hidden + moe.experts) * 4
        width += moe.top_k * ((spec.hidden + moe.intermediate) * size + 16)
        return tokens * width + Mlp.nbytes(spec, tokens, size)
