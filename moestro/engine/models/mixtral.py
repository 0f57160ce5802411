"""Mixtral (8x7B, 8x22B): reference transformers `mixtral`."""

from __future__ import annotations

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.qwen3_moe import QWEN_NAMES
from moestro.engine.models.spec import (
    AttentionSpec,
    ExpertNames,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RouterDtype,
    WeightNames,
)

_BLOCK = "model.layers.{l}.block_sparse_moe."
NAMES = WeightNames(
    router=(_BLOCK + "gate.weight", *QWEN_NAMES.router),
    experts=(
        ExpertNames(
            each=(
                _BLOCK + "experts.{e}.w1.weight",
                _BLOCK + "experts.{e}.w3.weight",
                _BLOCK + "experts.{e}.w2.weight",
            ),
            packed=(_BLOCK + "experts.gate_up_proj", _BLOCK + "experts.down_proj"),
        ),
        *QWEN_NAMES.experts,  # as transformers 5 holds them in memory
    ),
)


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
    return ModelSpec(
        family="mixtral",
        vocab_size=config.number("vocab_size", 32000),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-5),
        max_positions=config.number("max_position_embeddings", 4096 * 32),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=config.rope(head_dim, 1e6),
        layers=(LayerSpec(attention, moe),) * count,
        names=NAMES,
        dtype=config.dtype(),
    )
