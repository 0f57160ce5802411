"""Granite-MoE (Granite 3.0 and 3.1 MoE, PowerMoE), with shared experts or without: reference
transformers `granitemoe` and `granitemoeshared`."""

from __future__ import annotations

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.names import PackedExperts, WeightNames
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.router import TopKSoftmax
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RouterDtype,
    SharedSpec,
)

_LAYER = "model.layers.{l}."
_BLOCK = _LAYER + "block_sparse_moe."
NAMES = WeightNames(
    router=(_BLOCK + "router.layer.weight", _BLOCK + "router.weight"),
    experts=(
        PackedExperts(_BLOCK + "input_linear.weight", _BLOCK + "output_linear.weight"),
        PackedExperts(_BLOCK + "experts.gate_up_proj", _BLOCK + "experts.down_proj"),
    ),
    shared=(_LAYER + "shared_mlp.input_linear", _LAYER + "shared_mlp.output_linear"),
)


def spec(config: HFConfig) -> ModelSpec:
    """The model that a Granite-MoE config.json describes."""
    return _spec(config, "granitemoe", None)


def shared_spec(config: HFConfig) -> ModelSpec:
    """The model that the config.json of a Granite-MoE with shared experts describes."""
    width = config.number("shared_intermediate_size", 0, least=0)
    return _spec(config, "granitemoeshared", SharedSpec(width) if width else None)


def _spec(config: HFConfig, family: str, shared: SharedSpec | None) -> ModelSpec:
    hidden = config.number("hidden_size", 4096)
    heads = config.number("num_attention_heads", 32)
    head_dim = config.number("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    bias = config.flag("attention_bias", False)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", heads),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        multiplier=config.real("attention_multiplier", 1.0),
    )
    moe = MoESpec(
        experts=config.experts(8),
        top_k=config.number("num_experts_per_tok", 2),
        intermediate=config.number("intermediate_size", 11008),
        renormalize=True,
        router_dtype=RouterDtype.MODEL,
        router=TopKSoftmax(),
        shared=shared,
    )
    positions = config.number("max_position_embeddings", 2048)
    rope = read_rope(config, head_dim, 10000.0, positions)
    return ModelSpec(
        family=family,
        vocab_size=config.number("vocab_size", 32000),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-6),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=(LayerSpec(attention, moe),) * config.number("num_hidden_layers", 32),
        names=NAMES,
        dtype=config.dtype(),
        embedding_scale=config.real("embedding_multiplier", 1.0),
        residual_scale=config.real("residual_multiplier", 1.0),
        logits_divisor=config.real("logits_scaling", 1.0),
    )
