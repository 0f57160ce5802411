"""The norms of a model's residual stream, as the kernels take them."""

from __future__ import annotations

import torch

from moestro.engine.decoder import Decoder
from moestro.engine.models import spec as models
from moestro.kernels.gpu.norm import Norm


class Norms:
    """All norms of one model but those of queries and keys."""

    def __init__(self, decoder: Decoder) -> None:
        eps, kind = decoder.spec.norm_eps, decoder.spec.norm
        centered = kind in (models.Norm.LAYER, models.Norm.LAYER_NO_BIAS)
        rounded = kind is models.Norm.RMS

        def norm(weight: torch.Tensor, bias: torch.Tensor | None) -> Norm:
            return Norm(weight, eps, centered, rounded, bias)

        layers = [layer.weights for layer in decoder.layers]
        inputs = [norm(layer.input_norm, layer.input_norm_bias) for layer in layers]
        self.first = inputs[0]
        self.post = [norm(layer.post_norm, layer.post_norm_bias) for layer in layers]
        self.routed = [self.post[index] for index in decoder.spec.moe_layers]  # of MoE layers
        final = norm(decoder.final_norm, decoder.final_norm_bias)
        self.after = [*inputs[1:], final]  # what follows a layer: the next one's, or the last norm
