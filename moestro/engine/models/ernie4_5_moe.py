"""ERNIE-4.5-MoE (21B-A3B, 300B-A47B): reference transformers `ernie4_5_moe`."""

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
    RouterDtype,
    SharedSpec,
)
from moestro.errors import ModelError

_MLP = "model.layers.{l}.mlp."
NAMES = replace(
    QWEN_NAMES,
    router_bias=(
        _MLP + "moe_statics.e_score_correction_bias",
        _MLP + "gate.moe_statics.e_score_correction_bias",
    ),
    router_bias_rank=2,
    shared=tuple(f"{_MLP}shared_experts.{part}_proj" for part in ("gate", "up", "down")),
    unused=("model.mtp_", "mtp."),  # they predict further tokens, for speculative decoding
)


def spec(config: HFConfig) -> ModelSpec:
    """The model that an ERNIE-4.5-MoE config.json describes."""
    hidden = config.number("hidden_size", 2560)
    heads = config.number("num_attention_heads", 20)
    head_dim = config.number("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    config.require("use_bias", False)
    config.require("use_rmsnorm", True)
    config.require("moe_gate", "topk")
    config.require("moe_use_aux_free", True)
    config.ignore("moe_capacity", "num_nextn_predict_layers", "num_mtp_layers")
    attention = AttentionSpec(
        heads=heads, kv_heads=config.number("num_key_value_heads", 4), head_dim=head_dim
    )
    positions = config.number("max_position_embeddings", 131072)
    rope = read_rope(config, head_dim, 5e5, positions, interleaved=True)
    return ModelSpec(
        family="ernie4_5_moe",
        vocab_size=config.number("vocab_size", 103424),
        hidden=hidden,
        norm_eps=config.real("rms_norm_eps", 1e-5),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", True),
        rope=rope,
        layers=_layers(config, attention, _moe(config)),
        names=NAMES,
        dtype=config.dtype(),
    )


def _moe(config: HFConfig) -> MoESpec:
    width = config.number("moe_intermediate_size", 1536)
    shared = config.number("moe_num_shared_experts", 2, least=0)
    return MoESpec(
        experts=config.experts(64, "moe_num_experts"),
        top_k=config.number("moe_k", config.number("num_experts_per_tok", 6)),
        intermediate=width,
        renormalize=True,
        router_dtype=RouterDtype.MODEL,
        router=BiasedTopK(Scores.SOFTMAX, sum_min=config.real("moe_norm_min", 1e-12)),
        shared=SharedSpec(width * shared) if shared else None,
    )


def _layers(config: HFConfig, attention: AttentionSpec, moe: MoESpec) -> tuple[LayerSpec, ...]:
    count = config.number("num_hidden_layers", 28)
    first = config.number("moe_layer_start_index", 1, least=0)
    last = config.get("moe_layer_end_index", -1)
    if not isinstance(last, int):
        raise ModelError(f"config.json: moe_layer_end_index must be a number, is {last!r}")
    last = count - 1 if last == -1 else last
    every = config.number("moe_layer_interval", 1)
    dense = LayerSpec(attention, None, config.number("intermediate_size", 12288))
    return tuple(
        LayerSpec(attention, moe) if first <= layer <= last and (layer + 1) % every == 0 else dense
        for layer in range(count)
    )
