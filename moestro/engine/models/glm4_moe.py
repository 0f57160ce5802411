"""GLM-4-MoE (GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7): reference transformers `glm4_moe`."""

from __future__ import annotations

from dataclasses import replace

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.qwen3_moe import QWEN_NAMES
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.router import BiasedTopK, Scores
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    QKNorm,
    RouterDtype,
    SharedSpec,
)

_MLP = "model.layers.{l}.mlp."
NAMES = replace(
    QWEN_NAMES,
    router_bias=(_MLP + "gate.e_score_correction_bias",),
    shared=tuple(f"{_MLP}shared_experts.{part}_proj" for part in ("gate", "up", "down")),
)


def spec(config: HFConfig) -> ModelSpec:
    """The model that a GLM-4-MoE config.json describes."""
    hidden = config.number("hidden_size", 4096)
    count = config.number("num_hidden_layers", 46)
    heads = config.number("num_attention_heads", 96)
    head_dim = config.number("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", 8),
        head_dim=head_dim,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=QKNorm.HEAD if config.flag("use_qk_norm", False) else QKNorm.NONE,
    )
    moe = _moe(config)
    leading = config.number("first_k_dense_replace", 1, least=0)
    dense = LayerSpec(attention, None, config.number("intermediate_size", 10944))
    positions = config.number("max_position_embeddings", 131072)
    rope = read_rope(config, head_dim, 10000.0, positions, partial=0.5)
    return ModelSpec(
        family="glm4_moe",
        vocab_size=config.number("vocab_size", 151552),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-5),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=tuple(
            dense if layer < leading else LayerSpec(attention, moe) for layer in range(count)
        ),
        names=replace(NAMES, unused=predictors(config, count)),
        dtype=config.dtype(),
    )


def _moe(config: HFConfig) -> MoESpec:
    width = config.number("moe_intermediate_size", 1408)
    shared = config.number("n_shared_experts", 1, least=0)
    return MoESpec(
        experts=config.experts(128, "n_routed_experts"),
        top_k=config.number("num_experts_per_tok", 8),
        intermediate=width,
        renormalize=config.flag("norm_topk_prob", True),
        router_dtype=RouterDtype.FLOAT32,
        router=BiasedTopK(
            Scores.SIGMOID,
            groups=config.number("n_group", 1),
            kept=config.number("topk_group", 1),
            scale=config.real("routed_scaling_factor", 1.0),
            sum_add=1e-20,
        ),
        shared=SharedSpec(width * shared) if shared else None,
    )


def predictors(config: HFConfig, count: int) -> tuple[str, ...]:
    """Layers after the last: they predict further tokens, for speculative decoding."""
    counts = [config.number(k, 0, 0) for k in ("num_nextn_predict_layers", "num_mtp_layers")]
    return tuple(f"model.layers.{count + layer}." for layer in range(max(counts)))
