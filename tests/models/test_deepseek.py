"""DeepSeek's families beyond the checkpoints of `test_families`: what single keys change."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moestro.engine import executor
from moestro.engine.layers import moe
from moestro.engine.layers.latent import LatentAttention
from moestro.engine.models.registry import load_spec
from moestro.engine.models.router import GroupedSoftmax
from moestro.engine.models.spec import LatentSpec
from moestro.types import Request, SamplingParams
from tests.oracle import drive, families, family_golden, golden

WITHIN = 1e-4
PLAIN: dict[str, Any] = {"rope_scaling": None}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # As Moonlight has it: no groups, no latent vector for queries.
    "v3-direct": ("deepseek-v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, **PLAIN}),
    "v3-half-split": ("deepseek-v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "v2-all-sparse": ("deepseek-v2", {"first_k_dense_replace": 0, "attention_bias": True}),
    "v2-normed": ("deepseek-v2", {"norm_topk_prob": True}),
    "v2-yarn-half-said": (
        "deepseek-v2",
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128}},
    ),
}


def scores(folder: Path, tokens: tuple[int, ...], **settings: Any) -> torch.Tensor:
    """The engine's log-probability of every token after the first."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    with drive.engine(folder, **settings) as engine:
        found = drive.generate(engine, [Request("a", tokens, sampling)])["a"].prompt_logprobs
    assert found is not None
    return torch.tensor([one.logprob for one in found[1:] if one is not None])


@pytest.mark.parametrize("name", VARIANTS)
def test_other_values_of_keys(name: str, tmp_path: Path) -> None:
    base, changes = VARIANTS[name]
    tiny = families.TINY[base]
    tiny = replace(tiny, config=tiny.config | changes)
    folder = families.make(tmp_path / "model", tiny)
    model = families.load(folder, tiny)
    if changes.get("norm_topk_prob"):
        _repair(model)
    tokens = family_golden.prompts(288)[-1]
    logits = golden.forward(model, tokens)[:-1].log_softmax(-1)
    want = logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    got = scores(folder, tuple(tokens), max_sweep_tokens=64)
    torch.testing.assert_close(got, want, rtol=0, atol=WITHIN)


def _repair(model: Any) -> None:
    """transformers overlooks norm_topk_prob, with which DeepSeek's own code scales weights to sum
    1 and leaves routed_scaling_factor out."""
    for module in model.modules():
        if type(module).__name__ == "DeepseekV2TopkRouter":
            module.register_forward_hook(
                lambda _, __, out: (out[0], out[1] / out[1].sum(-1, keepdim=True), out[2])
            )


def test_which_layers_are_sparse(tmp_path: Path) -> None:
    config = families.TINY["deepseek-v2"].config | {"num_hidden_layers": 8, "moe_layer_freq": 3}
    families.write_config(tmp_path, replace(families.TINY["deepseek-v2"], config=config))
    assert load_spec(tmp_path).moe_layers == (3, 6)  # 0 is dense by first_k_dense_replace


def test_what_a_token_takes_in_the_cache(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite as published: 27 layers of 512 + 64 elements, not of 2 * 16 heads * 128."""
    lite = families.TINY["deepseek-v2-lite"]
    published = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    families.write_config(tmp_path, replace(lite, config=lite.config | published))
    block = load_spec(tmp_path).groups(2, 16, 4096).block
    assert block.block_bytes == 16 * 27 * (512 + 64) * 2


def test_chosen_experts_have_the_weights_that_the_router_gives(tmp_path: Path) -> None:
    raw = families.TINY["deepseek-v2"].config | {"norm_topk_prob": True}
    for config in (families.TINY["deepseek-v2"].config, raw):
        families.write_config(tmp_path, replace(families.TINY["deepseek-v2"], config=config))
        spec = load_spec(tmp_path).moe
        assert isinstance(spec.router, GroupedSoftmax)
        x, weight = torch.randn(9, 48), torch.randn(8, 48)
        weights, ids = moe.route(spec, weight, x)
        again, _ = moe.route_to(spec, weight, x, ids)
        torch.testing.assert_close(again, weights)
        groups = [set(row) for row in (ids // 2).tolist()]
        assert {len(row) for row in groups} == {spec.router.kept}
        total = weights.sum(-1)
        if spec.renormalize:
            torch.testing.assert_close(total, torch.ones(9))
        else:
            assert bool((total <= spec.router.scale).all())


def test_the_published_files(tmp_path: Path) -> None:
    """Keys of DeepSeek-V3's config.json; the release itself is in FP8."""
    published = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    spec = load_spec(tmp_path)
    assert len(spec.moe_layers) == 58
    assert spec.names.unused == ("model.layers.61.",)
    assert spec.layers[0].attention.scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)


@pytest.mark.parametrize("expands", [True, False])
def test_both_ways_to_sweep_are_one(
    expands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values made for all tokens, or projections absorbed: in short runs behind others,
    whole and in pieces of less than all heads."""
    tiny = families.TINY["deepseek-v2"]
    folder = families.make(tmp_path / "model", tiny)
    tokens = family_golden.prompts(288)[-1]
    logits = golden.forward(families.load(folder, tiny), tokens)[:-1].log_softmax(-1)
    want = logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    monkeypatch.setattr(LatentAttention, "_expands", lambda self, start, length: expands)
    for piece in (1e3, 1e9):
        monkeypatch.setattr(executor, "PIECE_FLOPS", piece)
        got = scores(folder, tuple(tokens), max_sweep_tokens=32)
        torch.testing.assert_close(got, want, rtol=0, atol=WITHIN)


def test_a_short_run_behind_much_absorbs() -> None:
    spec = LatentSpec(16, None, 512, 128, 64, 128, bias=False, scale=1.0)
    expands = partial(LatentAttention._expands, SimpleNamespace(spec=spec, _up=512 * 512))
    assert expands(0, 1)
    assert expands(0, 9000)
    assert expands(1000, 1000)
    assert not expands(4000, 20)
