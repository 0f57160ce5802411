"""OLMoE (OLMoE-1B-7B): reference transformers `olmoe`. Names as in Qwen3-MoE checkpoints."""

from __future__ import annotations

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.qwen3_moe import QWEN_NAMES
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    QKNorm,
    RouterDtype,
)


def spec(config: HFConfig) -> ModelSpec:
    """The model that an OLMoE config.json describes."""
    hidden = config.number("hidden_size", 2048)
    heads = config.number("num_attention_heads", 16)
    head_dim = config.number("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    clip = config.get("clip_qkv")
    bias = config.flag("attention_bias", False)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", heads),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm.FULL,
        clip=None if clip is None else float(clip),
    )
    moe = MoESpec(
        experts=config.experts(64),
        top_k=config.number("num_experts_per_tok", 8),
        intermediate=config.number("intermediate_size", 2048),
        renormalize=config.flag("norm_topk_prob", False),
        router_dtype=RouterDtype.MODEL,
    )
    count = config.number("num_hidden_layers", 16)
    positions = config.number("max_position_embeddings", 4096)
    rope = read_rope(config, head_dim, 10000.0, positions)
    return ModelSpec(
        family="olmoe",
        vocab_size=config.number("vocab_size", 50304),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-5),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=(LayerSpec(attention, moe),) * count,
        names=QWEN_NAMES,
        dtype=config.dtype(),
    )
