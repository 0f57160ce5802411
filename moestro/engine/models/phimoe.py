"""Phi-3.5-MoE: reference transformers `phimoe`. Tensor names as in Mixtral checkpoints."""

from __future__ import annotations

from dataclasses import replace

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.mixtral import NAMES as MIXTRAL_NAMES
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.router import SparseMixer
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    Norm,
    RouterDtype,
)

NAMES = replace(MIXTRAL_NAMES, router=(*MIXTRAL_NAMES.router, "model.layers.{l}.mlp.router.weight"))


def spec(config: HFConfig) -> ModelSpec:
    """The model that a Phi-3.5-MoE config.json describes."""
    hidden = config.number("hidden_size", 4096)
    heads = config.number("num_attention_heads", 32)
    head_dim = config.number("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    config.require("num_experts_per_tok", 2)  # what the router is made for
    config.ignore("input_jitter_noise")  # training
    bias = config.flag("attention_bias", False)
    window = config.get("sliding_window")
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", 8),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        window=None if window is None else config.number("sliding_window"),
    )
    moe = MoESpec(
        experts=config.experts(16),
        top_k=2,
        intermediate=config.number("intermediate_size", 6400),
        renormalize=False,
        router_dtype=RouterDtype.MODEL,
        router=SparseMixer(config.real("router_jitter_noise", 0.01)),
    )
    positions = config.number("max_position_embeddings", 4096 * 32)
    rope = read_rope(config, head_dim, 1e6, positions, own_magnitudes=True)
    return ModelSpec(
        family="phimoe",
        vocab_size=config.number("vocab_size", 32064),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-5),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=(LayerSpec(attention, moe),) * config.number("num_hidden_layers", 32),
        names=NAMES,
        dtype=config.dtype(),
        norm=Norm.LAYER,
        head_bias=config.flag("lm_head_bias", False),
    )
