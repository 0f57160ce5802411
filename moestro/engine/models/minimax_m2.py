"""MiniMax-M2: reference transformers `minimax_m2`. Tensor names as in Mixtral checkpoints."""

from __future__ import annotations

from dataclasses import replace

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.mixtral import NAMES as MIXTRAL_NAMES
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.router import BiasedTopK, Scores
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    QKNorm,
    RouterDtype,
)

NAMES = replace(
    MIXTRAL_NAMES,
    router_bias=(
        "model.layers.{l}.block_sparse_moe.e_score_correction_bias",
        "model.layers.{l}.mlp.e_score_correction_bias",
    ),
)


def spec(config: HFConfig) -> ModelSpec:
    """The model that a MiniMax-M2 config.json describes."""
    heads = config.number("num_attention_heads", 48)
    head_dim = config.number("head_dim", 128)
    _check(config)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", 8),
        head_dim=head_dim,
        qk_norm=QKNorm.FULL,
    )
    moe = MoESpec(
        experts=config.experts(256),
        top_k=config.number("num_experts_per_tok", 8),
        intermediate=config.number("intermediate_size", 1536),
        renormalize=True,
        router_dtype=RouterDtype.FLOAT32,
        router=BiasedTopK(Scores.SIGMOID, wide=False),
    )
    positions = config.number("max_position_embeddings", 196608)
    turned = config.number("rotary_dim", head_dim)
    rope = read_rope(config, head_dim, 5e6, positions, partial=turned / head_dim)
    return ModelSpec(
        family="minimax_m2",
        vocab_size=config.number("vocab_size", 200064),
        hidden=config.number("hidden_size", 3072),
        norm_eps=config.real("rms_norm_eps", 1e-6),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=(LayerSpec(attention, moe),) * config.number("num_hidden_layers", 62),
        names=NAMES,
        dtype=config.dtype(),
    )


def _check(config: HFConfig) -> None:
    """What the published files say beside what transformers knows, and it must be just this."""
    config.require("hidden_act", "silu")
    config.require("scoring_func", "sigmoid")
    config.require("use_routing_bias", True)
    config.require("use_qk_norm", True)
    config.require("qk_norm_type", "per_layer")
    config.require("shared_intermediate_size", 0)
    config.require("sliding_window")
    config.require_all("attn_type_list", 1)
    for part in ("full_attention", "linear_attention", "mlp"):
        for factor in ("alpha", "beta"):
            config.require(f"layernorm_{part}_{factor}", 1.0)
    # Further tokens, predicted for speculative decoding; and what shared experts would be.
    config.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    config.ignore("shared_moe_mode", "mlp_intermediate_size")
