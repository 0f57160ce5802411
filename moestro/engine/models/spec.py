"""What a model family is, as data.

Owns: the vocabulary in which a family describes itself; rotary embedding, routers and tensor names
have files of their own beside it. Does not own: reading a checkpoint's config (the family files do)
or running anything (`decoder` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moestro.engine.models.activation import Activation, SwiGLU
from moestro.engine.models.names import WeightNames
from moestro.engine.models.quantization import Quantization
from moestro.engine.models.rope import RopeSpec
from moestro.engine.models.router import (
    BiasedTopK,
    GroupedSoftmax,
    Router,
    SoftmaxTopK,
    TopKSoftmax,
)
from moestro.kv_cache.groups import LayerGroups, group_layers
from moestro.kv_cache.spec import LatentKV, LayerMemory, PagedKV, WindowKV


class QKNorm(Enum):
    """RMSNorm on queries and keys before rotary embedding."""

    NONE = "none"
    HEAD = "head"  # per head, weight [head_dim] (Qwen3)
    FULL = "full"  # over all heads together, weight [heads * head_dim] (OLMoE)


class Norm(Enum):
    """The norm before attention, before the feed-forward block and before the head."""

    RMS = "rms"
    RMS_WIDE = "rms-wide"  # the weight is applied in float32, before rounding (GPT-OSS)
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
    # A learned score for each head, which takes its share of the softmax and stands for no token.
    sinks: bool = False

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5) if self.multiplier is None else self.multiplier

    @property
    def activations(self) -> int:
        """Elements for each token while it is computed: projections and what heads give."""
        return 2 * (self.heads + 2 * self.kv_heads) * self.head_dim

    def elements(self, hidden: int) -> int:
        """Elements of the weights of one layer, or a few more."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (2 * q + 2 * kv) * hidden + 2 * hidden + q + 2 * kv + self.heads * self.sinks

    def memory(self, layers: int, dtype_bytes: int, block_size: int) -> LayerMemory:
        """What `layers` layers of this kind keep of their tokens."""
        sizes = layers, self.kv_heads, self.head_dim, dtype_bytes, block_size
        return PagedKV(*sizes) if self.window is None else WindowKV(*sizes, self.window)

    def problem(self) -> str | None:
        """Why there can be no such attention; None when there can."""
        if self.heads % self.kv_heads:
            return (
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly"
            )
        return f"head_dim {self.head_dim} is odd" if self.head_dim % 2 else None


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads come from one
    latent vector of a token, of `kv_rank`; beside it a token has one rotated key for all heads."""

    heads: int
    q_rank: int | None  # queries come from a latent vector too; None: from the token itself
    kv_rank: int
    plain: int  # dimensions of a head's query and key that are not rotated
    rotated: int  # and that are
    value: int  # dimensions of a head's value
    bias: bool  # of the projections to latent vectors and of the one to the output
    scale: float  # on the scores
    eps: float = 1e-6  # of the norms of latent vectors, whatever that of the model is

    @property
    def query(self) -> int:
        """Dimensions of a head's query."""
        return self.plain + self.rotated

    @property
    def entry(self) -> int:
        """Elements that one token leaves in the cache of a layer."""
        return self.kv_rank + self.rotated

    @property
    def window(self) -> None:
        """A token sees all before it."""

    @property
    def activations(self) -> int:
        """Elements for each token while it is computed: projections and what heads give."""
        return 2 * self.heads * (self.query + self.value) + 2 * self.entry + (self.q_rank or 0)

    def elements(self, hidden: int) -> int:
        """Elements of the weights of one layer, or a few more."""
        queries = self.heads * self.query
        down = queries if self.q_rank is None else self.q_rank
        up = 0 if self.q_rank is None else self.q_rank * (queries + 1)
        values = self.kv_rank * (self.heads * (self.plain + self.value) + 1)
        out = (self.heads * self.value + 1) * hidden
        return (down + self.entry) * (hidden + 1) + up + values + out

    def memory(self, layers: int, dtype_bytes: int, block_size: int) -> LayerMemory:
        """What `layers` layers of this kind keep of their tokens."""
        return LatentKV(layers, self.kv_rank, self.rotated, dtype_bytes, block_size)

    def problem(self) -> None:
        """As in `AttentionSpec`. There can be any: `rope_config` refuses an odd `rotated`."""


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
    activation: Activation = field(default_factory=SwiGLU)
    bias: bool = False  # beside both products of an expert

    @property
    def biased(self) -> bool:
        """The router has a bias [experts]: to choose by, or on its logits."""
        if isinstance(self.router, TopKSoftmax):
            return self.router.bias
        return isinstance(self.router, BiasedTopK)

    @property
    def wide(self) -> bool:
        """The router's weight and logits are float32 whatever the model's dtype is."""
        if isinstance(self.router, BiasedTopK):
            return self.router.wide
        return isinstance(self.router, GroupedSoftmax)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. `moe` is None for a dense layer of width `intermediate`."""

    attention: AttentionSpec | LatentSpec
    moe: MoESpec | None
    intermediate: int = 0

    @property
    def grouped(self) -> AttentionSpec:
        """The attention where it is grouped-query attention."""
        assert isinstance(self.attention, AttentionSpec), self.attention
        return self.attention


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
    quantization: Quantization | None = None  # of the checkpoint's weights

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
        """The attention shape where all layers have grouped-query attention of the same shape."""
        return self.layers[0].grouped

    def groups(
        self, dtype_bytes: int, block_size: int, longest: int, *, windows: bool = True
    ) -> LayerGroups:
        """What the layers keep of their tokens, in blocks of `block_size` tokens, when sequences
        have up to `longest`. Layers whose window is no shorter keep all, and without `windows` all
        layers do. ValueError when no block can serve all layers."""
        each = [layer.attention.memory(1, dtype_bytes, block_size) for layer in self.layers]
        gives = [windows and memory.seen_from(longest - 1) > 0 for memory in each]
        return group_layers(
            [memory if give else memory.kept() for memory, give in zip(each, gives, strict=True)]
        )
