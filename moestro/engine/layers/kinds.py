"""Which layer computes which kind of attention."""

from __future__ import annotations

from moestro.engine.layers.attention import Attention
from moestro.engine.layers.latent import LatentAttention
from moestro.engine.models.spec import AttentionSpec, LatentSpec
from moestro.engine.weights import LayerWeights

AttentionLayer = Attention | LatentAttention


def build_attention(
    spec: AttentionSpec | LatentSpec, weights: LayerWeights, eps: float, residual_scale: float
) -> AttentionLayer:
    """The layer that `spec` describes; `eps` is that of the model's norms."""
    if isinstance(spec, LatentSpec):
        return LatentAttention(spec, weights, residual_scale)
    return Attention(spec, weights, eps, residual_scale)
