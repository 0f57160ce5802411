"""Tiny random checkpoints of the families whose layout transformers itself writes.

Owns: one config.json for each, as the hub spells it, and the scales of the numbers. The names and
shapes of tensors come from transformers: a model of that config is saved, which gives hub names,
and its tensors are drawn anew. So nothing here repeats what the engine's own family files say.
"""

from __future__ import annotations

import importlib
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.oracle import vocabulary
from tests.oracle.tiny import LOGIT_SPREAD, ROUTER_GAIN, dump

Config = dict[str, Any]


@dataclass(frozen=True)
class Tiny:
    """A tiny checkpoint: what its config.json says, and the seed of its numbers."""

    family: str  # model_type
    architecture: str
    seed: int
    config: Config = field(hash=False)
    dtype: str = "float32"
    repair: Config = field(default_factory=dict, hash=False)  # what transformers is told besides


_COMMON: Config = {
    "vocab_size": 288,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": vocabulary.BOS,
    "eos_token_id": vocabulary.EOS,
    "pad_token_id": vocabulary.PAD,
}
_GLM: Config = {
    **_COMMON,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "num_nextn_predict_layers": 1,
}
_GRANITE: Config = {
    **_COMMON,
    "tie_word_embeddings": True,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "attention_bias": False,
    "embedding_multiplier": 0.6,
    "logits_scaling": 0.3,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "rope_scaling": None,
}
_PHI: Config = {
    **_COMMON,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.2,
    "input_jitter_noise": 0.01,
    "attention_bias": True,
    "lm_head_bias": True,
    "sliding_window": 512,
    "original_max_position_embeddings": 256,
    "rope_scaling": {
        "type": "longrope",
        "original_max_position_embeddings": 256,
        "short_factor": [1.0 + 0.05 * i for i in range(6)],
        "long_factor": [1.0 + 0.5 * i for i in range(6)],
        "short_mscale": 1.1,
        "long_mscale": 1.2,
    },
}
_ERNIE: Config = {
    **_COMMON,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "moe_k": 3,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "moe_layer_interval": 1,
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_use_aux_free": True,
    "use_rmsnorm": True,
    "use_bias": False,
    "rope_theta": 500000.0,
}
_MINIMAX: Config = {
    **_COMMON,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 8,
    "rope_theta": 5e6,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "attn_type_list": [1, 1],
    "shared_intermediate_size": 0,
}
_DBRX: Config = {
    "d_model": 48,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 512,
    "vocab_size": 288,
    "emb_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": False,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 500000.0},
    "ffn_config": {
        "ffn_hidden_size": 32,
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "moe_jitter_eps": 0.01,
        "moe_loss_weight": 0.05,
        "moe_normalize_expert_weights": 1.0,
    },
    "bos_token_id": vocabulary.BOS,
    "eos_token_id": vocabulary.EOS,
    "pad_token_id": vocabulary.PAD,
}
_LATENT: Config = {
    **_COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_bias": False,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "pretraining_tp": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
_DEEPSEEK_V2: Config = {
    **_LATENT,
    "q_lora_rank": 24,
    "n_shared_experts": 2,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.0,
    # As no published file has it: a factor on cos and sin beside that on scores.
    "rope_scaling": {**_LATENT["rope_scaling"], "mscale": 1.0},
}
_DEEPSEEK_V3: Config = {
    **_LATENT,
    "q_lora_rank": 24,
    "attention_bias": True,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "ep_size": 1,
}
_QWEN2: Config = {
    **_COMMON,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 21,
}

_GPT_OSS: Config = {
    **_COMMON,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "experts_per_token": 3,
    "attention_bias": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "initial_context_length": 128,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "swiglu_limit": 1.5,  # so low that numbers reach it
}
_WINDOWS: Config = {
    **_QWEN2,
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 2,
}
TINY = {
    "qwen2": Tiny("qwen2_moe", "Qwen2MoeForCausalLM", 1, _QWEN2),
    "qwen2-windows": Tiny("qwen2_moe", "Qwen2MoeForCausalLM", 0, _WINDOWS),
    "gpt-oss": Tiny("gpt_oss", "GptOssForCausalLM", 0, _GPT_OSS, dtype="bfloat16"),
    "glm4": Tiny("glm4_moe", "Glm4MoeForCausalLM", 0, _GLM),
    "glm4-groups": Tiny(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        3,
        {**_GLM, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "use_qk_norm": False},
    ),
    "deepseek-v2-lite": Tiny(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        1,
        {
            **_DEEPSEEK_V2,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "rope_scaling": _LATENT["rope_scaling"],
        },
        dtype="bfloat16",
    ),
    "deepseek-v2": Tiny("deepseek_v2", "DeepseekV2ForCausalLM", 0, _DEEPSEEK_V2),
    "deepseek-v3": Tiny("deepseek_v3", "DeepseekV3ForCausalLM", 1, _DEEPSEEK_V3),
    "granite": Tiny("granitemoe", "GraniteMoeForCausalLM", 0, _GRANITE),
    "granite-shared": Tiny(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        0,
        {**_GRANITE, "shared_intermediate_size": 40, "tie_word_embeddings": False},
    ),
    "phi": Tiny("phimoe", "PhiMoEForCausalLM", 0, _PHI),
    "ernie": Tiny("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", 0, _ERNIE, dtype="bfloat16"),
    "minimax-m2": Tiny("minimax_m2", "MiniMaxM2ForCausalLM", 0, _MINIMAX),
    # transformers does not look where the published files have the base of the rotary embedding.
    "dbrx": Tiny(
        "dbrx", "DbrxForCausalLM", 1, _DBRX, dtype="bfloat16",
        repair={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
}  # fmt: skip


def make(folder: Path, spec: Tiny) -> Path:
    """Write the whole checkpoint of `spec` into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    context = spec.config.get("max_position_embeddings") or spec.config["max_seq_len"]
    vocabulary.write(folder, vocabulary.build(), max_length=context)
    names = _layout(folder, spec)
    tied = bool(spec.config["tie_word_embeddings"])
    drawn = {name: _draw(spec, tied, name, shape) for name, shape in names.items()}
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, spec)
    ids = {"bos_token_id": vocabulary.BOS, "eos_token_id": vocabulary.EOS}
    dump(folder / "generation_config.json", ids)
    return folder


def load(folder: Path, spec: Tiny) -> Any:
    """The checkpoint in transformers, in float32; every tensor must find its place."""
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, **spec.repair)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    problems = {key: value for key, value in report.items() if value}
    if problems:
        raise AssertionError(f"transformers does not take {folder} as it is: {problems}")
    return model.eval()


def write_config(folder: Path, spec: Tiny) -> None:
    """The config.json of `spec` alone."""
    head = {"architectures": [spec.architecture], "model_type": spec.family}
    dump(folder / "config.json", head | {"torch_dtype": spec.dtype} | spec.config)


def _layout(folder: Path, spec: Tiny) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, as transformers saves them."""
    transformers = importlib.import_module("transformers")
    write_config(folder, spec)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}


# The end of a tensor's name -> how strong it is, in units of 1 / sqrt(its inputs).
_GAINS: tuple[tuple[str, float, float], ...] = (
    # pattern, gain, gain when the embeddings are tied: see `tiny` for why these differ
    (r"(lm_head)\.weight$", LOGIT_SPREAD, LOGIT_SPREAD),
    (r"(mlp\.gate|moe\.gate|router|router\.layer)\.weight$", ROUTER_GAIN, ROUTER_GAIN),
    (r"(down_proj|w2|output_linear)(\.weight)?$", 1.4, 2.5),
    (r"(o_proj|out_proj)\.weight$", 1.0, 0.15),
)


def _draw(spec: Tiny, tied: bool, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """One tensor; its numbers depend on the name alone."""
    seed = zlib.crc32(f"{spec.family}:{spec.seed}:{name}".encode())
    normal = np.random.RandomState(seed).standard_normal(shape)
    if "correction_bias" in name:
        values = 0.15 * normal
    elif name.endswith("sinks"):
        values = normal
    elif name.endswith("bias"):
        values = 0.1 * normal
    elif len(shape) == 1:
        values = 1 + 0.1 * normal
    elif re.search(r"(embed_tokens|wte)\.weight$", name):
        values = normal * (0.15 if tied else 1.0)
    else:
        found = [g for pattern, *g in _GAINS if re.search(pattern, name)]
        gain = found[0][tied] if found else 1.0
        inputs = shape[-1]
        if name.endswith("mlp.w2"):  # lies transposed
            inputs = spec.config["ffn_config"]["ffn_hidden_size"]
        elif spec.family == "gpt_oss" and name.endswith("_proj"):  # [E, in, out]
            inputs = shape[1]
        values = normal * gain / inputs**0.5
    grid = torch.from_numpy(values).to(torch.bfloat16)
    return grid.to(getattr(torch, spec.dtype)).contiguous()
