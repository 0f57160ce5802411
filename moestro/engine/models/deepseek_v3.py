"""DeepSeek-V3 (V3, R1, V3.1; Moonlight): reference transformers `deepseek_v3`."""

from __future__ import annotations

from dataclasses import replace

from moestro.engine.models.glm4_moe import predictors
from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.latent_config import latent_attention, latent_layers, latent_names
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.router import BiasedTopK, Scores
from moestro.engine.models.spec import ModelSpec, MoESpec, RouterDtype, SharedSpec


def spec(config: HFConfig) -> ModelSpec:
    """The model that a DeepSeek-V3 config.json describes."""
    count = config.number("num_hidden_layers", 61)
    positions = config.number("max_position_embeddings", 4096)
    rotated = config.number("qk_rope_head_dim", 64)
    interleaved = config.flag("rope_interleave", True)
    rope = read_rope(config, rotated, 10000.0, positions, interleaved=interleaved)
    attention = latent_attention(config, rope, q_rank=1536)
    config.require("hidden_act", "silu")
    config.ignore("aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux")  # of training
    names = latent_names(attention, biased=True)
    return ModelSpec(
        family="deepseek_v3",
        vocab_size=config.number("vocab_size", 129280),
        hidden=config.number("hidden_size", 7168),
        norm_eps=config.real("rms_norm_eps", 1e-6),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=latent_layers(config, attention, _moe(config), count, leading=3, width=18432),
        names=replace(names, unused=predictors(config, count)),
        dtype=config.dtype(),
    )


def _moe(config: HFConfig) -> MoESpec:
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    width = config.number("moe_intermediate_size", 2048)
    shared = config.number("n_shared_experts", 1, least=0)
    return MoESpec(
        experts=config.experts(256, "n_routed_experts"),
        top_k=config.number("num_experts_per_tok", 8),
        intermediate=width,
        renormalize=config.flag("norm_topk_prob", True),
        router_dtype=RouterDtype.FLOAT32,
        router=BiasedTopK(
            Scores.SIGMOID,
            groups=config.number("n_group", 8),
            kept=config.number("topk_group", 4),
            scale=config.real("routed_scaling_factor", 2.5),
            sum_add=1e-20,
        ),
        shared=SharedSpec(width * shared) if shared else None,
    )
