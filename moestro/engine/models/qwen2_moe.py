"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): reference transformers `qwen2_moe`."""

from __future__ import annotations

from dataclasses import replace

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.qwen3_moe import QWEN_NAMES, qwen_layers
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.spec import (
    AttentionSpec,
    ModelSpec,
    MoESpec,
    RouterDtype,
    SharedSpec,
)
from moestro.engine.models.windows import FULL, read_windows

_SHARED = "model.layers.{l}.mlp.shared_expert"
NAMES = replace(
    QWEN_NAMES,
    shared=tuple(f"{_SHARED}.{part}_proj" for part in ("gate", "up", "down")),
    shared_gate=_SHARED + "_gate",
)


def spec(config: HFConfig) -> ModelSpec:
    """The model that a Qwen2-MoE config.json describes."""
    hidden = config.number("hidden_size", 2048)
    count = config.number("num_hidden_layers", 24)
    heads = config.number("num_attention_heads", 16)
    head_dim = config.number("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    windows = _windows(config, count)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", 16),
        head_dim=head_dim,
        qkv_bias=config.flag("qkv_bias", True),
    )
    moe = MoESpec(
        experts=config.experts(60),
        top_k=config.number("num_experts_per_tok", 4),
        intermediate=config.number("moe_intermediate_size", 1408),
        renormalize=config.flag("norm_topk_prob", False),
        router_dtype=RouterDtype.MODEL,
        shared=SharedSpec(config.number("shared_expert_intermediate_size", 5632), gated=True),
    )
    positions = config.number("max_position_embeddings", 32768)
    rope = read_rope(config, head_dim, 10000.0, positions)
    return ModelSpec(
        family="qwen2_moe",
        vocab_size=config.number("vocab_size", 151936),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-6),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=qwen_layers(config, windows, attention, moe),
        names=NAMES,
        dtype=config.dtype(),
    )


def _windows(config: HFConfig, count: int) -> tuple[int | None, ...]:
    first_full = config.number("max_window_layers", 28, least=0)
    if config.flag("use_sliding_window", False):
        return read_windows(
            config, count, 4096, lambda layer: layer % 2 == 0 and layer < first_full
        )
    config.require_all("layer_types", FULL)
    config.ignore("sliding_window")
    return (None,) * count
