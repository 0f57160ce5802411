"""How checkpoints name their tensors, as data. `{l}` is the layer and `{e}` the expert.

Owns: the names of Llama-like checkpoints, and what a family may say instead. Does not own: shapes
or where a tensor goes (`engine.weights`, `engine.expert_files`).
"""

from __future__ import annotations

from dataclasses import dataclass

_LAYER = "model.layers.{l}."


@dataclass(frozen=True, slots=True)
class EachExpert:
    """Three tensors for each expert: gate and up [I, H], down [H, I]."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Two tensors for all experts of a layer: gate_up [E, 2I, H], down [E, H, I]."""

    gate_up: str
    down: str


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Three tensors for all experts of a layer, each [E * I, H]: down lies transposed (DBRX)."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class InterleavedExperts:
    """Two tensors for all experts of a layer, [in, out]: gate_up [E, H, 2I], where columns of gate
    and up take turns, and down [E, I, H]. Beside each its bias, as X_bias [E, out] (GPT-OSS)."""

    gate_up: str
    down: str

    @property
    def biases(self) -> tuple[str, str]:
        """Those of gate_up and of down."""
        return f"{self.gate_up}_bias", f"{self.down}_bias"


ExpertNames = EachExpert | PackedExperts | StackedExperts | InterleavedExperts


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of a family's tensors. Where several are given, the first that exists is taken.

    Names without `.weight` belong to modules, which may have a `.bias` too.
    """

    router: tuple[str, ...]
    experts: tuple[ExpertNames, ...]
    router_bias: tuple[str, ...] = ()  # of `BiasedTopK`, or of the router's logits
    router_bias_rank: int = 1  # 1: [E], 2: [1, E]
    shared: tuple[str, ...] = ()  # modules gate, up, down; or gate_up, down
    shared_gate: str = ""  # module
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = _LAYER + "input_layernorm"
    post_norm: str = _LAYER + "post_attention_layernorm"
    # Modules q, k, v; or one for all three; or, of `LatentSpec`, those to q's and to kv's vector.
    qkv: tuple[str, ...] = tuple(f"{_LAYER}self_attn.{part}_proj" for part in "qkv")
    out: str = _LAYER + "self_attn.o_proj"
    sinks: str = ""
    q_norm: str = _LAYER + "self_attn.q_norm"
    k_norm: str = _LAYER + "self_attn.k_norm"
    q_up: str = ""  # module; of `LatentSpec`, as is the next
    kv_up: str = ""
    dense: tuple[str, ...] = tuple(f"{_LAYER}mlp.{part}_proj" for part in ("gate", "up", "down"))
    unused: tuple[str, ...] = ()  # beginnings of tensors that are there and not for answering
