"""Config and checkpoint reading: what is damaged or unknown is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moestro.config import Config
from moestro.engine.build import describe, eos_token_ids
from moestro.engine.models.registry import load_spec
from moestro.errors import ConfigError, ModelError
from tests.oracle import tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.make(tmp_path / "model", tiny.Spec("qwen3_moe", 3))


def edit(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    raw = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            raw.pop(key, None)
        else:
            raw[key] = value
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"new_gate_trick": True}, "new_gate_trick"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "deepseek_v3"}, "qwen3_moe"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "not served"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "axial"),
        ({"rope_scaling": {"rope_type": "default", "odd_factor": 4.0}}, "odd_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "several values"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_local_experts": 5, "num_experts": 8}, "differ"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"hidden_size": 48.5}, "hidden_size"),
        ({"num_experts_per_tok": 99}, "99"),
        ({"num_key_value_heads": 3}, "3"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"mlp_only_layers": [0, 1, 2]}, "no MoE layer"),
    ],
)
def test_config_is_refused_by_name(model: Path, changes: dict[str, Any], words: str) -> None:
    edit(model, **changes)
    with pytest.raises(ModelError, match=words):
        load_spec(model)


def test_both_spellings_of_a_config_mean_the_same(tmp_path: Path) -> None:
    old = tiny.make(tmp_path / "old", tiny.Spec("qwen3_moe", 3))
    new = tiny.make(tmp_path / "new", tiny.Spec("qwen3_moe", 3, v5_config=True))
    assert load_spec(old) == load_spec(new)
    raw = json.loads((old / "config.json").read_text())
    edit(old, rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]})
    assert load_spec(old) == load_spec(new)


def rewrite(model: Path, change: Any) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(EXPERT), EXPERT),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({EXPERT: t[EXPERT].t().contiguous()}), "shape"),
        (lambda t: t.update({EXPERT: t[EXPERT].double()}), "F64"),
        (lambda t: t.update({"model.layers.0.mlp.extra": torch.ones(1)}), "mlp.extra"),
    ],
)
def test_tensors_are_refused_by_name(model: Path, change: Any, words: str) -> None:
    rewrite(model, change)
    with pytest.raises(ModelError, match=words):
        describe(Config(), model)


def test_files_are_refused_by_name(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ModelError, match="is cut"):
        describe(Config(), model)
    path.write_bytes(b"PK\x03\x04 this is a pickle")
    with pytest.raises(ModelError, match="not a safetensors file"):
        describe(Config(), model)
    path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ModelError, match="no safetensors file"):
        describe(Config(), model)


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "model", tiny.Spec("qwen3_moe", 3, shards=3))
    assert describe(Config(), model)["experts"] == 24
    victim = sorted(model.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        describe(Config(), model)


def test_cuda_is_refused_while_there_is_no_backend(model: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        describe(Config(device="cuda"), model)


def test_all_end_of_sequence_ids_count(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    edit(model, eos_token_id=5)
    assert eos_token_ids(model) == (7, 5)
    edit(model, eos_token_id=9)
    assert eos_token_ids(model) == (7, 5, 9)
