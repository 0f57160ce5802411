"""A model's router on the device, one class for each way of choosing.

Owns: logits, and which kernel chooses with which constants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from moestro.engine.gpu.product import product
from moestro.engine.models.router import (
    BiasedTopK,
    GroupedSoftmax,
    Scores,
    SoftmaxTopK,
    SparseMixer,
    TopKSoftmax,
)
from moestro.engine.models.spec import MoESpec
from moestro.engine.weights import LayerWeights
from moestro.kernels.gpu.router import scored_topk, softmax_topk, sparse_mixer


class Router(ABC):
    """Chooses the experts of rows."""

    __slots__ = ()

    def score(self, layer: LayerWeights, x: torch.Tensor, out: torch.Tensor) -> None:
        """Logits [B, experts] of x [B, hidden]."""
        assert layer.router is not None
        product(x, layer.router, None, out)

    @abstractmethod
    def choose(
        self,
        layer: LayerWeights,
        logits: torch.Tensor,
        count: torch.Tensor,
        *,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """weights and ids int32 [B, k], best first, for logits [B, experts]. Only the first `count`
        rows, int32 [1] on the device, are real: the others get ids -1 and weights 0."""


@dataclass(frozen=True, slots=True)
class Softmax(Router):
    """`SoftmaxTopK`, and `TopKSoftmax`: of a softmax over the chosen alone the denominators of the
    one over all cancel out."""

    k: int
    renormalize: bool

    def choose(
        self,
        layer: LayerWeights,
        logits: torch.Tensor,
        count: torch.Tensor,
        *,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """See `Router`."""
        softmax_topk(logits, count, self.k, self.renormalize, weights=weights, ids=ids)


@dataclass(frozen=True, slots=True)
class BiasedLogits(Softmax):
    """`TopKSoftmax` with a bias."""

    def score(self, layer: LayerWeights, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `Router`."""
        assert layer.router is not None
        product(x, layer.router, layer.router_bias, out)


@dataclass(frozen=True, slots=True)
class Biased(Router):
    """`BiasedTopK`."""

    k: int
    renormalize: bool
    spec: BiasedTopK

    def choose(
        self,
        layer: LayerWeights,
        logits: torch.Tensor,
        count: torch.Tensor,
        *,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """See `Router`."""
        assert layer.router_bias is not None
        spec = self.spec
        scored_topk(
            logits,
            layer.router_bias,
            count,
            self.k,
            self.renormalize,
            sigmoid=spec.scores is Scores.SIGMOID,
            groups=spec.groups,
            kept=spec.kept,
            pairs=True,
            scale=spec.scale,
            sum_add=spec.sum_add,
            sum_min=spec.sum_min,
            weights=weights,
            ids=ids,
        )


@dataclass(frozen=True, slots=True)
class Grouped(Router):
    """`GroupedSoftmax`."""

    k: int
    renormalize: bool
    spec: GroupedSoftmax

    def choose(
        self,
        layer: LayerWeights,
        logits: torch.Tensor,
        count: torch.Tensor,
        *,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """See `Router`."""
        spec = self.spec
        scored_topk(
            logits,
            None,
            count,
            self.k,
            self.renormalize,
            groups=spec.groups,
            kept=spec.kept,
            scale=spec.scale,
            weights=weights,
            ids=ids,
        )


@dataclass(frozen=True, slots=True)
class Mixer(Router):
    """`SparseMixer`."""

    jitter: float

    def choose(
        self,
        layer: LayerWeights,
        logits: torch.Tensor,
        count: torch.Tensor,
        *,
        weights: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """See `Router`."""
        sparse_mixer(logits, count, self.jitter, weights=weights, ids=ids)


def build_router(moe: MoESpec) -> Router:
    """The router that `moe` describes, which `engine.gpu.blocks` lets through."""
    match moe.router:
        case SoftmaxTopK():
            return Softmax(moe.top_k, moe.renormalize)
        case TopKSoftmax(bias=bias):
            return BiasedLogits(moe.top_k, True) if bias else Softmax(moe.top_k, True)
        case BiasedTopK() as spec:
            return Biased(moe.top_k, moe.renormalize, spec)
        case GroupedSoftmax() as spec:
            return Grouped(moe.top_k, moe.renormalize, spec)
        case SparseMixer(jitter):
            return Mixer(jitter)
