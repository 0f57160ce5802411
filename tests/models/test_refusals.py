"""What a family does not serve, and tensors that are not as they should be, are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moestro.config import Config
from moestro.engine.build import describe
from moestro.engine.models.registry import FAMILIES, load_spec
from moestro.errors import ModelError
from tests.oracle import families

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A function: the checkpoint of `families.TINY` with this name."""
    known: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in known:
            folder = tmp_path_factory.mktemp("refused") / name
            known[name] = families.make(folder, families.TINY[name])
        return known[name]

    return get


def test_every_family_has_an_oracle() -> None:
    old = {"qwen3_moe", "olmoe", "mixtral"}  # `tests.oracle.specs` has those
    assert {spec.family for spec in families.TINY.values()} | old == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "qwen2-windows",
            {"layer_types": ["sliding_attention"]},
            "layer_types must be a list of 3",
        ),
        ("qwen2-windows", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("gpt-oss", {"sliding_window": None}, "no sliding_window"),
        ("gpt-oss", {"experts_per_token": 2}, "experts_per_token"),
        ("gpt-oss", {"initial_context_length": 4096}, "initial_context_length"),
        ("gpt-oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"scoring_func": "sigmoid"}, "unknown keys scoring_func"),
        ("glm4", {"topk_method": "greedy"}, "unknown keys topk_method"),
        ("glm4", {"n_group": 3}, "groups"),
        ("glm4-groups", {"topk_group": 1}, "groups"),
        ("glm4", {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek-v2", {"n_group": 3}, "groups"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek-v2", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek-v2", {"qk_rope_head_dim": 7}, "7 of 7 dimensions"),
        ("deepseek-v2", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek-v3", {"n_group": 8}, "groups"),
        ("deepseek-v3", {"head_dim": 16}, "head_dim"),
        ("deepseek-v3", {"index_topk": 16}, "unknown keys index_topk"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("granite", {"position_embedding_type": "nope"}, "position_embedding_type"),
        ("phi", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("phi", {"rope_scaling": {"type": "su"}}, "'su' is not served"),
        ("ernie", {"use_bias": True}, "use_bias"),
        ("ernie", {"moe_gate": "top2"}, "moe_gate"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("minimax-m2", {"attn_type_list": [0, 1]}, "attn_type_list"),
        ("minimax-m2", {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "ffn_config.moe_normalize"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn.name"),
        ("dbrx", {"attn_config": {"alibi": True}}, "unknown keys attn_config.alibi"),
        ("dbrx", {"attn_config": []}, "attn_config must be an object"),
    ],
)
def test_a_config_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str, made: Checkpoints, tmp_path: Path
) -> None:
    raw = json.loads((made(name) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=words):
        load_spec(tmp_path)


def test_weights_that_are_not_scaled_to_sum_1(made: Checkpoints, tmp_path: Path) -> None:
    raw = json.loads((made("dbrx") / "config.json").read_text())
    raw["ffn_config"]["moe_normalize_expert_weights"] = None
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_spec(made("dbrx")).moe.renormalize
    assert not load_spec(tmp_path).moe.renormalize  # null says so, unlike leaving it out


def test_the_base_of_the_rotary_embedding_is_where_the_published_files_have_it(
    made: Checkpoints, tmp_path: Path
) -> None:
    raw = json.loads((made("dbrx") / "config.json").read_text())
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}  # by transformers
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_spec(tmp_path).rope.theta == load_spec(made("dbrx")).rope.theta == 500000.0


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("gpt-oss", "model.layers.1.self_attn.sinks"),
        ("gpt-oss", "model.layers.0.mlp.router.bias"),
        ("gpt-oss", "model.layers.2.mlp.experts.gate_up_proj"),
        ("gpt-oss", "model.layers.2.mlp.experts.down_proj_bias"),
        ("glm4", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("glm4", "model.layers.2.mlp.shared_experts.up_proj.weight"),
        ("deepseek-v2-lite", "model.layers.0.self_attn.q_proj.weight"),
        ("deepseek-v2", "model.layers.1.self_attn.q_a_layernorm.weight"),
        ("deepseek-v2", "model.layers.0.self_attn.q_b_proj.weight"),
        ("deepseek-v3", "model.layers.2.self_attn.kv_a_proj_with_mqa.bias"),
        ("deepseek-v3", "model.layers.2.self_attn.kv_b_proj.weight"),
        ("deepseek-v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("granite", "model.layers.0.block_sparse_moe.output_linear.weight"),
        ("granite-shared", "model.layers.1.shared_mlp.input_linear.weight"),
        ("phi", "model.layers.0.post_attention_layernorm.bias"),
        ("phi", "lm_head.bias"),
        ("ernie", "model.layers.2.mlp.moe_statics.e_score_correction_bias"),
        ("minimax-m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        ("dbrx", "transformer.blocks.1.ffn.experts.mlp.v1"),
        ("dbrx", "transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight"),
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(
    name: str, tensor: str, made: Checkpoints, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((made(name) / "config.json").read_bytes())
    tensors = load_file(made(name) / "model.safetensors")
    whole = tensors.pop(tensor)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{tensor} is missing"):
        describe(Config(device="cpu"), tmp_path)
    save_file(tensors | {tensor: whole[..., :-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{tensor} has shape"):
        describe(Config(device="cpu"), tmp_path)


def test_layers_that_predict_further_tokens_are_left_out(made: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((made("glm4") / "config.json").read_bytes())
    tensors = load_file(made("glm4") / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": tensors["model.norm.weight"].clone()}
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert describe(Config(device="cpu"), tmp_path)["family"] == "glm4_moe"
    beyond = {"model.layers.4.eh_proj.weight": tensors["model.norm.weight"].clone()}
    save_file(tensors | beyond, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.4\.eh_proj"):
        describe(Config(device="cpu"), tmp_path)
