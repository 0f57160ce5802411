"""Every kind of block through the GPU's steps and sweeps gives what the CPU gives.

Triton's interpreter stands in for the GPU, as in `test_gpu_path`; the few tokens of each family are
enough to see a block that is wired wrongly.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.engine.gpu import mlp
from moestro.engine.gpu.workspace import Workspace
from moestro.engine.models.registry import load_spec
from moestro.engine.models.router import BiasedTopK
from moestro.engine.models.spec import AttentionSpec, LayerSpec, ModelSpec, MoESpec, SharedSpec
from tests.engine.test_gpu_path import _interpreted
from tests.oracle import drive, families

__all__ = ["_interpreted"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_sweep_tokens": 4, "kv_cache_tokens": 64}
_ONE = {"num_hidden_layers": 1}
_DENSE_AND_SPARSE = {"num_hidden_layers": 2}
# One of each block, in as few layers as show it.
SHALLOW: dict[str, dict[str, Any]] = {
    "qwen2": _ONE,  # gated shared experts
    "glm4-groups": _DENSE_AND_SPARSE,  # sigmoid with a bias, in groups
    "granite-shared": _ONE,  # softmax over the chosen, multipliers
    "phi": _ONE,  # sparse mixer, LayerNorm, bias of the head, magnitude of the rotary embedding
    "ernie": _DENSE_AND_SPARSE | {"moe_layer_end_index": 1},  # softmax with a bias
    "minimax-m2": _ONE,  # sigmoid in the model's dtype
    "dbrx": {"n_layers": 1},  # LayerNorm without bias
    # Sinks, a window, biases of experts and router, clamped activation, another RMSNorm.
    "gpt-oss": _ONE | {"layer_types": ["sliding_attention"], "sliding_window": 2},
}


def make(folder: Path, name: str) -> Path:
    tiny = families.TINY[name]
    return families.make(folder, dataclasses.replace(tiny, config=tiny.config | SHALLOW[name]))


def scores(folder: Path, tokens: int, **more: Any) -> list[float]:
    """Log-probabilities of a prompt and of `tokens` tokens after it."""
    request = drive.greedy("a", [5, 6], tokens, logprobs=1, prompt_logprobs=1)
    with drive.engine(folder, **SMALL | more) as engine:
        found = drive.generate(engine, [request])["a"]
    assert found.error is None
    assert found.prompt_logprobs is not None
    prompt = [one.logprob for one in found.prompt_logprobs if one is not None]
    return prompt + [one.logprob for one in found.logprobs]


@pytest.mark.parametrize("name", SHALLOW)
def test_the_cpu_s_logprobs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / name, name)
    on_gpu = scores(folder, 2)
    monkeypatch.undo()
    assert on_gpu == pytest.approx(scores(folder, 2), abs=1e-4, rel=0)


def test_a_router_in_float32_of_a_model_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "glm", "glm4-groups")
    on_gpu = scores(folder, 1, dtype="float16")
    monkeypatch.undo()
    assert on_gpu == pytest.approx(scores(folder, 1), abs=0.05, rel=0)


def test_every_property_of_a_model_is_known() -> None:
    """Whoever adds a field makes the GPU path heed it, or `missing_blocks` refuse it."""
    known: dict[type, set[str]] = {
        ModelSpec: {
            "family", "vocab_size", "hidden", "norm_eps", "max_positions", "tied_head", "rope",
            "layers", "names", "dtype", "norm", "head_bias", "embedding_scale", "residual_scale",
            "logits_divisor", "quantization",
        },
        LayerSpec: {"attention", "moe", "intermediate"},
        AttentionSpec: {
            "heads", "kv_heads", "head_dim", "qkv_bias", "out_bias", "qk_norm", "clip", "window",
            "multiplier", "sinks",
        },
        MoESpec: {
            "experts", "top_k", "intermediate", "renormalize", "router_dtype", "router", "shared",
            "activation", "bias",
        },
        SharedSpec: {"intermediate", "gated"},
        BiasedTopK: {"scores", "groups", "kept", "scale", "sum_add", "sum_min", "wide"},
    }  # fmt: skip
    for kind, names in known.items():
        assert {field.name for field in dataclasses.fields(kind)} == names, kind


@pytest.mark.parametrize("name", ["glm4-groups", "qwen2", "qwen2-windows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_counts_a_sweep_s_buffers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    families.write_config(tmp_path, families.TINY[name])
    spec, tokens = load_spec(tmp_path), 3 * mlp.ROWS
    space = Workspace(spec, tokens, dtype, torch.device("meta"))
    parts = [*vars(space).values(), *vars(space.mlp).values()]
    parts += [getattr(space.routes, field.name) for field in dataclasses.fields(space.routes)]
    held = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    wide = spec.hidden * 4 if spec.moe.wide and dtype != torch.float32 else 0  # of logits' product
    planned = Workspace.nbytes(spec, tokens, dtype.itemsize)
    assert held + wide * tokens <= planned <= 1.2 * (held + wide * tokens)
