"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): reference transformers `qwen3_moe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.names import EachExpert, PackedExperts, WeightNames
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    QKNorm,
    RouterDtype,
)
from moestro.engine.models.windows import read_windows

_MLP = "model.layers.{l}.mlp."
QWEN_EXPERTS = (
    EachExpert(*(f"{_MLP}experts.{{e}}.{part}_proj.weight" for part in ("gate", "up", "down"))),
    PackedExperts(_MLP + "experts.gate_up_proj", _MLP + "experts.down_proj"),
)
QWEN_NAMES = WeightNames(router=(_MLP + "gate.weight",), experts=QWEN_EXPERTS)


def spec(config: HFConfig) -> ModelSpec:
    """The model that a Qwen3-MoE config.json describes."""
    hidden = config.number("hidden_size", 2048)
    count = config.number("num_hidden_layers", 24)
    heads = config.number("num_attention_heads", 32)
    head_dim = config.number("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    config.ignore("sliding_window", "layer_types", "max_window_layers")
    windows: tuple[int | None, ...] = (None,) * count
    if config.flag("use_sliding_window", False):
        windows = read_windows(config, count, 4096, lambda layer: True)
    bias = config.flag("attention_bias", False)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", 4),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm.HEAD,
    )
    moe = MoESpec(
        experts=config.experts(128),
        top_k=config.number("num_experts_per_tok", 8),
        intermediate=config.number("moe_intermediate_size", 768),
        renormalize=config.flag("norm_topk_prob", False),
        router_dtype=RouterDtype.MODEL,
    )
    positions = config.number("max_position_embeddings", 32768)
    rope = read_rope(config, head_dim, 10000.0, positions)
    return ModelSpec(
        family="qwen3_moe",
        vocab_size=config.number("vocab_size", 151936),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-6),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=qwen_layers(config, windows, attention, moe),
        names=QWEN_NAMES,
        dtype=config.dtype(),
    )


def qwen_layers(
    config: HFConfig, windows: Sequence[int | None], attention: AttentionSpec, moe: MoESpec
) -> tuple[LayerSpec, ...]:
    """Sparse and dense layers, as decoder_sparse_step and mlp_only_layers say, each with its
    window."""
    dense_only = set(config.get("mlp_only_layers", []))
    every = config.number("decoder_sparse_step", 1)
    width = config.number("intermediate_size", 6144)
    return tuple(
        LayerSpec(replace(attention, window=window), moe)
        if layer not in dense_only and (layer + 1) % every == 0
        else LayerSpec(replace(attention, window=window), None, width)
        for layer, window in enumerate(windows)
    )
