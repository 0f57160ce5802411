"""What a model family is, as data.

Owns: the vocabulary in which a family describes itself. Does not own: reading a checkpoint's
config (the family files do) or running anything (`decoder` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class QKNorm(Enum):
    """RMSNorm on queries and keys before rotary embedding."""

    NONE = "none"
    HEAD = "head"  # per head, weight [head_dim] (Qwen3)
    FULL = "full"  # over all heads together, weight [heads * head_dim] (OLMoE)


class RouterDtype(Enum):
    """In which dtype the chosen experts' weights reach the experts."""

    FLOAT32 = "float32"  # Mixtral
    MODEL = "model"  # Qwen3-MoE, OLMoE: cast to the model's dtype after renormalising


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, half-split layout, over the first `dim` of a head's dimensions."""

    theta: float
    dim: int


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

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Experts and the router in front of them: softmax over all, top-k, maybe renormalised."""

    experts: int
    top_k: int
    intermediate: int
    renormalize: bool
    router_dtype: RouterDtype


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. `moe` is None for a dense layer of width `intermediate`."""

    attention: AttentionSpec
    moe: MoESpec | None
    intermediate: int = 0


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a checkpoint may name a layer's experts; `{l}` and `{e}` are filled in.

    `each` has (gate, up, down), one tensor per expert. `packed` has (gate_up [E, 2I, H],
    down [E, H, I]). A checkpoint may use either.
    """

    each: tuple[str, str, str]
    packed: tuple[str, str]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Family-specific tensor names; everything else is named as in Llama checkpoints."""

    router: tuple[str, ...]  # alternatives, first found wins
    experts: tuple[ExpertNames, ...]


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
