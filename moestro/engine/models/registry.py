"""Which families are served, and finding the one a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moestro.engine.models import (
    dbrx,
    ernie4_5_moe,
    glm4_moe,
    granite_moe,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from moestro.engine.models.hf_config import HFConfig, read_json
from moestro.engine.models.router import BiasedTopK
from moestro.engine.models.spec import ModelSpec, MoESpec
from moestro.errors import ModelError

FAMILIES: dict[str, tuple[str, Callable[[HFConfig], ModelSpec]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe.spec),
    "qwen2_moe": ("Qwen2MoeForCausalLM", qwen2_moe.spec),
    "olmoe": ("OlmoeForCausalLM", olmoe.spec),
    "mixtral": ("MixtralForCausalLM", mixtral.spec),
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
    config.require("quantization_config")
    spec = read(config)
    config.done()
    _check(spec)
    return spec


def _check(spec: ModelSpec) -> None:
    if not spec.moe_layers:
        raise ModelError("config.json: the model has no MoE layer")
    attention, moe = spec.attention, spec.moe
    if attention.heads % attention.kv_heads:
        raise ModelError(
            f"config.json: {attention.heads} attention heads cannot share "
            f"{attention.kv_heads} key/value heads evenly"
        )
    if attention.head_dim % 2:
        raise ModelError(f"config.json: head_dim {attention.head_dim} is odd")
    if moe.top_k > moe.experts:
        raise ModelError(f"config.json: {moe.top_k} experts per token, but only {moe.experts}")
    if isinstance(moe.router, BiasedTopK):
        _check_groups(moe, moe.router)


def _check_groups(moe: MoESpec, router: BiasedTopK) -> None:
    groups, kept = router.groups, router.kept
    if groups == 1:
        return
    size = moe.experts // groups
    if moe.experts % groups or size < 2 or not kept <= groups or kept * size < moe.top_k:
        raise ModelError(
            f"config.json: {moe.top_k} of {moe.experts} experts cannot be chosen from {kept} of "
            f"{groups} groups"
        )
