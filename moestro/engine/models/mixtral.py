"""Mixtral (8x7B, 8x22B): reference transformers `mixtral`."""

from __future__ import annotations

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.names import EachExpert, PackedExperts, WeightNames
from moestro.engine.models.qwen3_moe import QWEN_NAMES
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RouterDtype,
)

_BLOCK = "model.layers.{l}.block_sparse_moe."
MIXTRAL_EXPERTS = (
    EachExpert(*(f"{_BLOCK}experts.{{e}}.{part}.weight" for part in ("w1", "w3", "w2"))),
    PackedExperts(_BLOCK + "experts.gate_up_proj", _BLOCK + "experts.down_proj"),
    *QWEN_NAMES.experts,  # as transformers 5 holds them in memory
)
NAMES = WeightNames(router=(_BLOCK + "gate.weight", *QWEN_NAMES.router), experts=MIXTRAL_EXPERTS)


def spec(config: HFConfig) -> ModelSpec:
    """The model that a Mixtral config.json describes."""
    hidden = config.number("hidden_size", 4096)
    heads = config.number("num_attention_heads", 32)
    head_dim = config.number("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    window = config.get("sliding_window")
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", 8),
        head_dim=head_dim,
        window=None if window is None else config.number("sliding_window"),
    )
    moe = MoESpec(
        experts=config.experts(8),
        top_k=config.number("num_experts_per_tok", 2),
        intermediate=config.number("intermediate_size", 14336),
        renormalize=True,
        router_dtype=RouterDtype.FLOAT32,
    )
    count = config.number("num_hidden_layers", 32)
    positions = config.number("max_position_embeddings", 4096 * 32)
    rope = read_rope(config, head_dim, 1e6, positions)
    return ModelSpec(
        family="mixtral",
        vocab_size=config.number("vocab_size", 32000),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-5),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=(LayerSpec(attention, moe),) * count,
        names=NAMES,
        dtype=config.dtype(),
    )
