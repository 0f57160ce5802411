"""DeepSeek-V2 (V2, V2-Lite, Coder-V2, V2.5): reference transformers `deepseek_v2`."""

from __future__ import annotations

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.latent_config import latent_attention, latent_layers, latent_names
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.router import GroupedSoftmax
from moestro.engine.models.spec import ModelSpec, MoESpec, RouterDtype, SharedSpec


def spec(config: HFConfig) -> ModelSpec:
    """The model that a DeepSeek-V2 config.json describes."""
    count = config.number("num_hidden_layers", 32)
    positions = config.number("max_position_embeddings", 2048)
    rotated = config.number("qk_rope_head_dim", 64)
    rope = read_rope(config, rotated, 10000.0, positions, interleaved=True)
    attention = latent_attention(config, rope, q_rank=1536)
    config.require("hidden_act", "silu")
    config.require("mlp_bias", False)
    config.require("scoring_func", "softmax")
    config.ignore("aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux")  # of training
    return ModelSpec(
        family="deepseek_v2",
        vocab_size=config.number("vocab_size", 102400),
        hidden=config.number("hidden_size", 4096),
        norm_eps=config.real("rms_norm_eps", 1e-6),
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=latent_layers(config, attention, _moe(config), count, leading=0, width=11008),
        names=latent_names(attention, biased=False),
        dtype=config.dtype(),
    )


def _moe(config: HFConfig) -> MoESpec:
    config.require("topk_method", "greedy", "group_limited_greedy")
    groups, kept = config.number("n_group", 1), config.number("topk_group", 1)
    if config.get("topk_method", "greedy") == "greedy":
        groups = kept = 1
    top_k = config.number("num_experts_per_tok")
    # DeepSeek's code does one or the other; transformers overlooks norm_topk_prob.
    renormalize = config.flag("norm_topk_prob", False) and top_k > 1
    scale = config.real("routed_scaling_factor", 1.0)
    width = config.number("moe_intermediate_size", 1407)
    shared = config.number("n_shared_experts", 2, least=0)
    return MoESpec(
        experts=config.experts(64, "n_routed_experts"),
        top_k=top_k,
        intermediate=width,
        renormalize=renormalize,
        router_dtype=RouterDtype.FLOAT32,
        router=GroupedSoftmax(groups, kept, 1.0 if renormalize else scale),
        shared=SharedSpec(width * shared) if shared else None,
    )
