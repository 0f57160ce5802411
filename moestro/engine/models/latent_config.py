"""Reads what the config.json of a DeepSeek family says of latent attention and of its layers.

Owns: the keys that DeepSeek-V2 and V3 share. Their routers are their own files'.
"""

from __future__ import annotations

from dataclasses import replace

from moestro.engine.models.hf_config import HFConfig
from moestro.engine.models.names import WeightNames
from moestro.engine.models.qwen3_moe import QWEN_NAMES
from moestro.engine.models.rope import RopeSpec, Yarn
from moestro.engine.models.spec import LatentSpec, LayerSpec, MoESpec

_ATTENTION = "model.layers.{l}.self_attn."
_MLP = "model.layers.{l}.mlp."


def latent_attention(config: HFConfig, rope: RopeSpec, q_rank: int) -> LatentSpec:
    """Latent attention as `config` says it; `q_rank` is the family's default."""
    heads = config.number("num_attention_heads", 32)
    plain, rotated = config.number("qk_nope_head_dim", 128), rope.dim
    config.require("num_key_value_heads", heads)
    config.require("head_dim", rotated)
    config.require("qk_head_dim", plain + rotated)
    on_scores = rope.scaling.on_scores if isinstance(rope.scaling, Yarn) else 1.0
    direct = config.is_null("q_lora_rank")  # null says so, unlike leaving it out
    return LatentSpec(
        heads=heads,
        q_rank=None if direct else config.number("q_lora_rank", q_rank),
        kv_rank=config.number("kv_lora_rank", 512),
        plain=plain,
        rotated=rotated,
        value=config.number("v_head_dim", 128),
        bias=config.flag("attention_bias", False),
        scale=float((plain + rotated) ** -0.5) * on_scores,
    )


def latent_layers(
    config: HFConfig, attention: LatentSpec, moe: MoESpec, count: int, leading: int, width: int
) -> tuple[LayerSpec, ...]:
    """`count` layers; `leading` dense ones of `width` come first when the config does not say."""
    leading = config.number("first_k_dense_replace", leading, least=0)
    every = config.number("moe_layer_freq", 1)  # transformers overlooks it
    dense = LayerSpec(attention, None, config.number("intermediate_size", width))
    sparse = LayerSpec(attention, moe)
    return tuple(
        sparse if layer >= leading and layer % every == 0 else dense for layer in range(count)
    )


def latent_names(attention: LatentSpec, *, biased: bool) -> WeightNames:
    """Names of tensors; `biased`: the router has a bias to choose by."""
    to_queries = "q_proj" if attention.q_rank is None else "q_a_proj"
    return replace(
        QWEN_NAMES,
        router_bias=(_MLP + "gate.e_score_correction_bias",) if biased else (),
        shared=tuple(f"{_MLP}shared_experts.{part}_proj" for part in ("gate", "up", "down")),
        qkv=(_ATTENTION + to_queries, _ATTENTION + "kv_a_proj_with_mqa"),
        q_norm=_ATTENTION + "q_a_layernorm",
        k_norm=_ATTENTION + "kv_a_layernorm",
        q_up=_ATTENTION + "q_b_proj",
        kv_up=_ATTENTION + "kv_b_proj",
    )
