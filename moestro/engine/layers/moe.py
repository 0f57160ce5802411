"""Router and dense MLP: the parts of a feed-forward block that need no expert.

Owns: which experts a token wants and with which weight. The experts themselves are computed by
whoever holds them (`engine.experts`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moestro.engine.models.spec import MoESpec, RouterDtype
from moestro.kernels import reference as ops


def route(
    spec: MoESpec, weight: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, hidden] -> weights [T, k], ids [T, k]: softmax over all experts, then top-k
    (transformers: `Qwen3MoeTopKRouter`, `OlmoeTopKRouter`, `MixtralTopKRouter`)."""
    out = torch.float32 if spec.router_dtype is RouterDtype.FLOAT32 else x.dtype
    return ops.softmax_topk(F.linear(x, weight), spec.top_k, spec.renormalize, out)


def route_to(
    spec: MoESpec, weight: torch.Tensor, x: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for experts ids [T, k] that somebody else chose: the router's own weights of them,
    renormalised as the model does. For benchmarks."""
    out = torch.float32 if spec.router_dtype is RouterDtype.FLOAT32 else x.dtype
    weights = torch.softmax(F.linear(x, weight), -1, dtype=torch.float32).gather(-1, ids)
    if spec.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(out), ids


def dense_mlp(gate_up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate x) * up x) for x [T, hidden]."""
    return F.linear(ops.swiglu(F.linear(x, gate_up)), down)
