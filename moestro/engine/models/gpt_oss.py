"""GPT-OSS (gpt-oss-20b, gpt-oss-120b): reference transformers `gpt_oss`."""

from __future__ import annotations

from dataclasses import replace

from moestro.engine.models.activation import ClampedSwiGLU
from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.names import InterleavedExperts, WeightNames
from moestro.engine.models.rope import Yarn
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.router import TopKSoftmax
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    Norm,
    RouterDtype,
)
from moestro.engine.models.windows import read_windows

_MLP = "model.layers.{l}.mlp."
NAMES = WeightNames(
    router=(_MLP + "router.weight",),
    router_bias=(_MLP + "router.bias",),
    experts=(InterleavedExperts(_MLP + "experts.gate_up_proj", _MLP + "experts.down_proj"),),
    sinks="model.layers.{l}.self_attn.sinks",
)


def spec(config: HFConfig) -> ModelSpec:
    """The model that a GPT-OSS config.json describes."""
    count = config.number("num_hidden_layers", 36)
    heads = config.number("num_attention_heads", 64)
    head_dim = config.number("head_dim", 64)
    config.require("hidden_act", "silu")
    bias = config.flag("attention_bias", True)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=config.number("num_key_value_heads", 8),
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    top_k = config.number("num_experts_per_tok", 4)
    config.require("experts_per_token", top_k)  # the same, in the published files
    moe = MoESpec(
        experts=config.experts(128),
        top_k=top_k,
        intermediate=config.number("intermediate_size", 2880),
        renormalize=True,
        router_dtype=RouterDtype.MODEL,
        router=TopKSoftmax(bias=True),
        activation=ClampedSwiGLU(
            alpha=config.real("swiglu_alpha", 1.702), limit=config.real("swiglu_limit", 7.0)
        ),
        bias=True,
    )
    windows = read_windows(config, count, 128, lambda layer: layer % 2 == 0)
    positions = config.number("max_position_embeddings", 131072)
    rope = read_rope(config, head_dim, 150000.0, positions)
    if isinstance(rope.scaling, Yarn):
        config.require("initial_context_length", rope.scaling.trained)
    return ModelSpec(
        family="gpt_oss",
        vocab_size=config.number("vocab_size", 201088),
        hidden=config.number("hidden_size", 2880),
        norm_eps=config.real("rms_norm_eps", 1e-5),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=tuple(LayerSpec(replace(attention, window=window), moe) for window in windows),
        names=NAMES,
        dtype=config.dtype(),
        norm=Norm.RMS_WIDE,
    )
