"""DBRX (dbrx-base, dbrx-instruct): reference transformers `dbrx`, except for the base of its rotary
embedding. That is in attn_config in the published files, where transformers does not look for it.
"""

from __future__ import annotations

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.names import StackedExperts, WeightNames
from moestro.engine.models.rope_config import read_rope
from moestro.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    Norm,
    RouterDtype,
)

_BLOCK = "transformer.blocks.{l}."
_ATTENTION = _BLOCK + "norm_attn_norm."
NAMES = WeightNames(
    router=(_BLOCK + "ffn.router.layer.weight",),
    experts=(StackedExperts(*(f"{_BLOCK}ffn.experts.mlp.{part}" for part in ("w1", "v1", "w2"))),),
    embedding="transformer.wte",
    final_norm="transformer.norm_f",
    input_norm=_ATTENTION + "norm_1",
    post_norm=_ATTENTION + "norm_2",
    qkv=(_ATTENTION + "attn.Wqkv",),
    out=_ATTENTION + "attn.out_proj",
)


def spec(config: HFConfig) -> ModelSpec:
    """The model that a DBRX config.json describes."""
    hidden = config.number("d_model", 2048)
    heads = config.number("n_heads", 16)
    head_dim = hidden // heads
    inner = config.part("attn_config")
    clip = inner.get("clip_qkv")
    inner.ignore("attn_pdrop")
    config.ignore("emb_pdrop")
    attention = AttentionSpec(
        heads=heads,
        kv_heads=inner.number("kv_n_heads", config.number("num_key_value_heads", 1)),
        head_dim=head_dim,
        clip=None if clip is None else inner.real("clip_qkv", 1.0),
    )
    positions = config.number("max_seq_len", 2048)
    theta = inner.get("rope_theta")
    rope = read_rope(
        config,
        head_dim,
        10000.0,
        positions,
        base=None if theta is None else inner.real("rope_theta", 1.0),
    )
    return ModelSpec(
        family="dbrx",
        vocab_size=config.number("vocab_size", 32000),
        hidden=hidden,
        norm_eps=1e-5,
        max_positions=rope.reach(positions),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        layers=(LayerSpec(attention, _moe(config, hidden)),) * config.number("n_layers", 24),
        names=NAMES,
        dtype=config.dtype(),
        norm=Norm.LAYER_NO_BIAS,
    )


def _moe(config: HFConfig, hidden: int) -> MoESpec:
    inner = config.part("ffn_config")
    inner.part("ffn_act_fn").require("name", "silu")
    inner.require("hidden_size", hidden)
    inner.require("uniform_expert_assignment", False)
    inner.require("moe_normalize_expert_weights", 1.0)  # the sum; other norms are not computed
    inner.ignore("moe_jitter_eps", "moe_loss_weight")  # training
    return MoESpec(
        experts=inner.number("moe_num_experts", 4),
        top_k=inner.number("moe_top_k", 1),
        intermediate=inner.number("ffn_hidden_size", 3584),
        renormalize=not inner.is_null("moe_normalize_expert_weights"),
        router_dtype=RouterDtype.MODEL,
    )
