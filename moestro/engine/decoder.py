"""The one decoder stack: embedding, layers, head.

Owns: the order of operations in a layer and the decode pass. Does not own: sweeps, which travel
the same layers a piece at a time (`engine.sweep`), or any cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moestro.engine.batch import DecodeStep
from moestro.engine.experts import ExpertExecutor
from moestro.engine.layers.attention import Attention
from moestro.engine.layers.moe import dense_mlp, route, route_to
from moestro.engine.models.spec import LayerSpec, ModelSpec
from moestro.engine.synthetic import RoutingSource
from moestro.engine.weights import DecoderWeights, LayerWeights
from moestro.kernels import reference as ops
from moestro.kv_cache.storage import KVStorage


class DecoderLayer:
    """One pre-norm layer. `ordinal` counts MoE layers, as the expert cache does."""

    def __init__(self, spec: LayerSpec, weights: LayerWeights, eps: float, ordinal: int) -> None:
        self.spec = spec
        self.weights = weights
        self.ordinal = ordinal
        self.attention = Attention(spec.attention, weights, eps)
        self._eps = eps

    def input_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Norm before attention."""
        return ops.rms_norm(x, self.weights.input_norm, self._eps)

    def post_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Norm before the experts or the dense MLP."""
        return ops.rms_norm(x, self.weights.post_norm, self._eps)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] and expert ids [T, k]; only on MoE layers."""
        assert self.spec.moe is not None and self.weights.router is not None
        return route(self.spec.moe, self.weights.router, x)

    def route_to(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for experts ids [T, k] that are given."""
        assert self.spec.moe is not None and self.weights.router is not None
        return route_to(self.spec.moe, self.weights.router, x, ids)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """The dense MLP; only on layers without experts."""
        assert self.weights.gate_up is not None and self.weights.down is not None
        return dense_mlp(self.weights.gate_up, self.weights.down, x)


class Decoder:
    """A model's dense weights arranged for running."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.embedding = weights.embedding  # [vocab, hidden]
        self.final_norm = weights.final_norm  # [hidden]
        self.head = weights.head  # [vocab, hidden]
        self.routing: RoutingSource | None = None  # decides in place of the routers when set
        exponent = torch.arange(0, spec.rope.dim, 2, dtype=torch.float32) / spec.rope.dim
        self.inverse = 1.0 / spec.rope.theta**exponent  # rotary frequencies [dim / 2]
        ordinals = {layer: n for n, layer in enumerate(spec.moe_layers)}
        self.layers = [
            DecoderLayer(layer, weights.layers[i], spec.norm_eps, ordinals.get(i, -1))
            for i, layer in enumerate(spec.layers)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.embedding.dtype

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [T] -> [T, hidden]."""
        return F.embedding(tokens, self.embedding)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] after the last layer -> float32 logits [T, vocab]."""
        normed = ops.rms_norm(x, self.final_norm, self.spec.norm_eps)
        return F.linear(normed, self.head).float()

    def decode(self, step: DecodeStep, kv: KVStorage, experts: ExpertExecutor) -> torch.Tensor:
        """One token of every sequence through all layers -> logits [B, vocab]."""
        x = self.embed(step.tokens)
        given = None
        if self.routing is not None:
            given = torch.from_numpy(self.routing.step(step.ids)).long()  # [layers, B, k]
        for index, layer in enumerate(self.layers):
            x = layer.attention.decode(layer.input_norm(x), x, step, kv.view(index))
            normed = layer.post_norm(x)
            if layer.spec.moe is None:
                x = x + layer.dense(normed)
                continue
            if given is None:
                weights, ids = layer.route(normed)
            else:
                weights, ids = layer.route_to(normed, given[layer.ordinal])
            x = x + experts.decode(layer.ordinal, normed, weights, ids, step.ids)
        return self.logits(x)
