"""The one decoder stack: embedding, layers, head.

Owns: the order of operations in a layer and the decode pass. Does not own: sweeps, which travel
the same layers a piece at a time (`engine.sweep`), or any cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moestro.engine.batch import DecodeStep
from moestro.engine.experts import ExpertExecutor
from moestro.engine.layers.kinds import build_attention
from moestro.engine.layers.moe import dense_mlp, route, route_to, shared_mlp
from moestro.engine.layers.norm import apply_norm
from moestro.engine.models.spec import ModelSpec
from moestro.engine.rotary import build_rotary
from moestro.engine.synthetic import RoutingSource
from moestro.engine.weights import DecoderWeights, LayerWeights
from moestro.kv_cache.storage import KVStorage


class DecoderLayer:
    """Layer `index` of a model, pre-norm. `ordinal` counts MoE layers, as the expert cache does."""

    def __init__(self, model: ModelSpec, index: int, weights: LayerWeights, ordinal: int) -> None:
        self.spec = model.layers[index]
        self.weights = weights
        self.ordinal = ordinal
        self.attention = build_attention(
            self.spec.attention, weights, model.norm_eps, model.residual_scale
        )
        self._model = model

    def input_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Norm before attention."""
        return self._norm(x, self.weights.input_norm, self.weights.input_norm_bias)

    def post_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Norm before the experts or the dense MLP."""
        return self._norm(x, self.weights.post_norm, self.weights.post_norm_bias)

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return apply_norm(self._model.norm, x, weight, bias, self._model.norm_eps)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] and expert ids [T, k]; only on MoE layers."""
        assert self.spec.moe is not None and self.weights.router is not None
        return route(self.spec.moe, self.weights.router, x, self.weights.router_bias)

    def route_to(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for experts ids [T, k] that are given."""
        assert self.spec.moe is not None and self.weights.router is not None
        return route_to(self.spec.moe, self.weights.router, x, ids, self.weights.router_bias)

    @property
    def has_shared(self) -> bool:
        """Whether there is a shared expert beside the routed ones."""
        return self.spec.moe is not None and self.spec.moe.shared is not None

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """The shared expert; only where `has_shared`."""
        weights = self.weights
        assert weights.shared_gate_up is not None and weights.shared_down is not None
        return shared_mlp(weights.shared_gate_up, weights.shared_down, weights.shared_gate, x)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """The dense MLP; only on layers without experts."""
        assert self.weights.gate_up is not None and self.weights.down is not None
        return dense_mlp(self.weights.gate_up, self.weights.down, x)

    def add(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """x += added, times the model's residual scale, in place. Returns x."""
        return x.add_(added, alpha=self._model.residual_scale)


class Decoder:
    """A model's dense weights arranged for running."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, longest: int | None = None
    ) -> None:
        """`longest`: tokens that a sequence may have, if not what is usual for the model."""
        self.spec = spec
        self.embedding = weights.embedding  # [vocab, hidden]
        self.final_norm = weights.final_norm  # [hidden]
        self.final_norm_bias = weights.final_norm_bias
        self.head = weights.head  # [vocab, hidden]
        self.routing: RoutingSource | None = None  # decides in place of the routers when set
        self.rotary = build_rotary(spec.rope, longest or spec.usual_positions)
        ordinals = {layer: n for n, layer in enumerate(spec.moe_layers)}
        self.layers = [
            DecoderLayer(spec, i, layer, ordinals.get(i, -1))
            for i, layer in enumerate(weights.layers)
        ]
        self._weights = weights

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.embedding.dtype

    @property
    def inverse(self) -> torch.Tensor:
        """Rotary frequencies [dim / 2]."""
        return self.rotary.inverse

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [T] -> [T, hidden]."""
        x = F.embedding(tokens, self.embedding)
        return x if self.spec.embedding_scale == 1.0 else x * self.spec.embedding_scale

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] after the last layer -> float32 logits [T, vocab]."""
        spec = self.spec
        normed = apply_norm(spec.norm, x, self.final_norm, self.final_norm_bias, spec.norm_eps)
        return self.score(normed).float()

    def score(self, normed: torch.Tensor) -> torch.Tensor:
        """normed [T, hidden] after the final norm -> logits [T, vocab] in its dtype."""
        logits = F.linear(normed, self.head, self._weights.head_bias)
        divisor = self.spec.logits_divisor
        return logits if divisor == 1.0 else logits / divisor

    def decode(
        self, steps: Sequence[DecodeStep], kv: KVStorage, experts: ExpertExecutor
    ) -> torch.Tensor:
        """One token of every sequence through all layers -> logits [B, vocab]. `steps` are the
        same step as each group of layers sees it."""
        step = steps[0]
        x = self.embed(step.tokens)
        given = None
        if self.routing is not None:
            given = torch.from_numpy(self.routing.step(step.ids)).long()  # [layers, B, k]
        for index, layer in enumerate(self.layers):
            view = kv.view(index)
            x = layer.attention.decode(layer.input_norm(x), x, steps[view.group], view)
            normed = layer.post_norm(x)
            if layer.spec.moe is None:
                layer.add(x, layer.dense(normed))
                continue
            if given is None:
                weights, ids = layer.route(normed)
            else:
                weights, ids = layer.route_to(normed, given[layer.ordinal])
            added = experts.decode(layer.ordinal, normed, weights, ids, step.ids)
            if layer.has_shared:
                added += layer.shared(normed)
            layer.add(x, added)
        return self.logits(x)
