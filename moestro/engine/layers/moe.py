"""Router, dense MLP and shared experts: the parts of a feed-forward block that need no cache.

Owns: which experts a token wants and with which weight. The routed experts themselves are computed
by whoever holds them (`engine.experts`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from moestro.engine.models.activation import Activation, ClampedSwiGLU
from moestro.engine.models.router import (
    BiasedTopK,
    GroupedSoftmax,
    Scores,
    SparseMixer,
    TopKSoftmax,
)
from moestro.engine.models.spec import MoESpec, RouterDtype
from moestro.kernels import reference as ops
from moestro.kernels.packed import Weight, linear


def route(
    spec: MoESpec, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, hidden] -> weights [T, k], ids [T, k], as `spec.router` says. `bias` [experts] if it
    is `spec.biased`."""
    router, logits = spec.router, _logits(spec, weight, x, bias)
    out = _dtype(spec, x)
    match router:
        case TopKSoftmax():
            return ops.topk_softmax(logits, spec.top_k, out)
        case SparseMixer():
            return ops.sparse_mixer(logits, router.jitter, out)
        case BiasedTopK():
            assert bias is not None
            scores = _scores(router, logits)
            ids = ops.biased_topk(scores, bias, spec.top_k, router.groups, router.kept)
            return _chosen(spec, router, scores, ids).to(out), ids
        case GroupedSoftmax():
            weights, ids = ops.grouped_softmax(logits, spec.top_k, router.groups, router.kept)
            return _scaled(spec, router, weights).to(out), ids
    return ops.softmax_topk(logits, spec.top_k, spec.renormalize, out)


def route_to(
    spec: MoESpec,
    weight: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for experts ids [T, k] that somebody else chose: the router's own weights of them,
    renormalised as the model does. For benchmarks; a sparse mixer, which gives distant experts
    nothing, is taken for a softmax."""
    router, logits = spec.router, _logits(spec, weight, x, bias)
    out = _dtype(spec, x)
    if isinstance(router, BiasedTopK):
        return _chosen(spec, router, _scores(router, logits), ids).to(out), ids
    weights = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, ids)
    if isinstance(router, GroupedSoftmax):
        return _scaled(spec, router, weights).to(out), ids
    if spec.renormalize:  # softmax over the chosen alone is the same
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(out), ids


def dense_mlp(gate_up: Weight, down: Weight, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate x) * up x) for x [T, hidden]."""
    return linear(ops.swiglu(linear(x, gate_up)), down)


def shared_mlp(
    gate_up: Weight, down: Weight, gate: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    """The shared expert: a dense MLP, times sigmoid(gate x) when there is a gate [1, hidden]."""
    result = dense_mlp(gate_up, down, x)
    return result if gate is None else result * torch.sigmoid(F.linear(x, gate))


def _logits(
    spec: MoESpec, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if spec.wide:
        return F.linear(x.float(), weight.float())
    if bias is not None and isinstance(spec.router, TopKSoftmax):
        return F.linear(x, weight, bias.to(x.dtype))
    return F.linear(x, weight)


def gating(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """From gate_up [T, 2I] = [gate | up] to what an expert's second product gets, [T, I]."""
    if isinstance(activation, ClampedSwiGLU):
        alpha, limit = activation.alpha, activation.limit
        return lambda gate_up: ops.clamped_swiglu(gate_up, alpha, limit)
    return ops.swiglu


def _dtype(spec: MoESpec, x: torch.Tensor) -> torch.dtype:
    return torch.float32 if spec.router_dtype is RouterDtype.FLOAT32 else x.dtype


def _scores(router: BiasedTopK, logits: torch.Tensor) -> torch.Tensor:
    if router.scores is Scores.SIGMOID:
        return torch.sigmoid(logits.float())
    return torch.softmax(logits, -1, dtype=torch.float32)


def _chosen(
    spec: MoESpec, router: BiasedTopK, scores: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The chosen experts' weights: scores without bias."""
    weights = scores.gather(-1, ids)
    if spec.renormalize:
        total = weights.sum(-1, keepdim=True) + router.sum_add
        weights = weights / total.clamp(min=router.sum_min)
    return weights * router.scale


def _scaled(spec: MoESpec, router: GroupedSoftmax, weights: torch.Tensor) -> torch.Tensor:
    if spec.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * router.scale
