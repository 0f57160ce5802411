"""Which families are served, and finding the one a checkpoint belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from moestro.engine.models import (
    dbrx,
    deepseek_v2,
    deepseek_v3,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granite_moe,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from moestro.engine.models.hf_config import HFConfig, read_json
from moestro.engine.models.quantization import read_quantization
from moestro.engine.models.router import BiasedTopK, GroupedSoftmax
from moestro.engine.models.spec import ModelSpec, MoESpec
from moestro.errors import ModelError

FAMILIES: dict[str, tuple[str, Callable[[HFConfig], ModelSpec]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe.spec),
    "qwen2_moe": ("Qwen2MoeForCausalLM", qwen2_moe.spec),
    "olmoe": ("OlmoeForCausalLM", olmoe.spec),
    "mixtral": ("MixtralForCausalLM", mixtral.spec),
    "deepseek_v2": ("DeepseekV2ForCausalLM", deepseek_v2.spec),
    "deepseek_v3": ("DeepseekV3ForCausalLM", deepseek_v3.spec),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss.spec),
    "glm4_moe": ("Glm4MoeForCausalLM", glm4_moe.spec),
    "granitemoe": ("GraniteMoeForCausalLM", granite_moe.spec),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", granite_moe.shared_spec),
    "phimoe": ("PhimoeForCausalLM", phimoe.spec),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", ernie4_5_moe.spec),
    "minimax_m2": ("MiniMaxM2ForCausalLM", minimax_m2.spec),
    "dbrx": ("DbrxForCausalLM", dbrx.spec),
}


def load_spec(path: Path) -> ModelSpec:
    """The spec of the checkpoint in folder `path`; ModelError if it is not one we serve."""
    raw = read_json(path / "config.json")
    kind = raw.get("model_type")
    served = ", ".join(f"{name} ({arch})" for name, (arch, _) in FAMILIES.items())
    if kind not in FAMILIES:
        raise ModelError(f"model_type {kind!r} is not served; served are: {served}")
    architecture, read = FAMILIES[kind]
    named = raw.get("architectures") or [architecture]
    if architecture.lower() not in [str(name).lower() for name in named]:  # PhiMoE, Phimoe
        raise ModelError(f"architecture {named!r} of {kind} is not served; served are: {served}")
    config = HFConfig(raw)
    quantization = read_quantization(config, path)
    spec = dataclasses.replace(read(config), quantization=quantization)
    config.done()
    _check(spec)
    return spec


def _check(spec: ModelSpec) -> None:
    if not spec.moe_layers:
        raise ModelError("config.json: the model has no MoE layer")
    for layer in spec.layers:
        if problem := layer.attention.problem():
            raise ModelError(f"config.json: {problem}")
    try:
        spec.groups(2, 16, spec.max_positions)
    except ValueError as error:
        raise ModelError(f"config.json: {error}") from None
    moe = spec.moe
    if moe.top_k > moe.experts:
        raise ModelError(f"config.json: {moe.top_k} experts per token, but only {moe.experts}")
    if isinstance(moe.router, BiasedTopK | GroupedSoftmax):
        _check_groups(moe, moe.router)


def _check_groups(moe: MoESpec, router: BiasedTopK | GroupedSoftmax) -> None:
    groups, kept = router.groups, router.kept
    if groups == 1:
        return
    size = moe.experts // groups
    least = 2 if isinstance(router, BiasedTopK) else 1  # experts that make a group's worth
    if moe.experts % groups or size < least or not kept <= groups or kept * size < moe.top_k:
        raise ModelError(
            f"config.json: {moe.top_k} of {moe.experts} experts cannot be chosen from {kept} of "
            f"{groups} groups"
        )
