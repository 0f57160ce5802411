"""What a model family is, as data.

Owns: the vocabulary in which a family describes itself; rotary embedding, routers and tensor names
have files of their own beside it. Does not own: reading a checkpoint's config (the family files do)
or running anything (`decoder` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moestro.engine.models.names import WeightNames
from moestro.engine.models.rope import RopeSpec
from moestro.engine.models.router import BiasedTopK, Router, SoftmaxTopK


class QKNorm(Enum):
    """RMSNorm on queries and keys before rotary embedding."""

    NONE = "none"
    HEAD = "head"  # per head, weight [head_dim] (Qwen3)
    FULL = "full"  # over all heads together, weight [heads * head_dim] (OLMoE)


class Norm(Enum):
    """The norm before attention, before the feed-forward block and before the head."""

    RMS = "rms"
    LAYER = "layer"  # mean taken off, weight and bias (Phi-3.5-MoE)
    LAYER_NO_BIAS = "layer-no-bias"  # mean taken off, weight alone (DBRX)


class RouterDtype(Enum):
    """In which dtype the chosen experts' weights reach the experts."""

    FLOAT32 = "float32"  # Mixtral
    MODEL = "model"  # Qwen3-MoE, OLMoE: cast to the model's dtype after renormalising


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention with a paged KV cache."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    clip: float | None = None  # clamp q, k, v to +-clip
    window: int | None = None  # a token sees itself and the window - 1 before it
    multiplier: float | None = None  # on the scores; None: 1 / sqrt(head_dim)

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5) if self.multiplier is None else self.multiplier


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """A dense MLP beside the routed experts, which every token passes. `gated`: its output is
    multiplied by the sigmoid of one more learned projection."""

    intermediate: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Experts, the router in front of them and what is beside them."""

    experts: int
    top_k: int
    intermediate: int
    renormalize: bool  # scale the weights of the chosen to sum 1
    router_dtype: RouterDtype
    router: Router = field(default_factory=SoftmaxTopK)
    shared: SharedSpec | None = None

    @property
    def biased(self) -> bool:
        """The router has a bias [experts] to choose by."""
        return isinstance(self.router, BiasedTopK)

    @property
    def wide(self) -> bool:
        """The router's weight and logits are float32 whatever the model's dtype is."""
        return isinstance(self.router, BiasedTopK) and self.router.wide


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. `moe` is None for a dense layer of width `intermediate`."""

    attention: AttentionSpec
    moe: MoESpec | None
    intermediate: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model."""

    family: str
    vocab_size: int
    hidden: int
    norm_eps: float
    max_positions: int
    tied_head: bool
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    names: WeightNames
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    norm: Norm = Norm.RMS
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # on what attention and feed-forward add
    logits_divisor: float = 1.0

    @property
    def usual_positions(self) -> int:
        """Context length when none is asked for: never so long that frequencies become others."""
        return min(self.max_positions, self.rope.trained or self.max_positions)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def moe(self) -> MoESpec:
        """The MoE shape, the same in all MoE layers of the families served."""
        spec = self.layers[self.moe_layers[0]].moe
        assert spec is not None
        return spec

    @property
    def attention(self) -> AttentionSpec:
        """The attention shape, the same in all layers of the families served."""
        return self.layers[0].attention
