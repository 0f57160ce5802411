"""Which families are served, and finding the one a checkpoint belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moestro.engine.models import mixtral, olmoe, qwen3_moe
from moestro.engine.models.hf_config import HFConfig, read_json
from moestro.engine.models.spec import ModelSpec
from moestro.errors import ModelError

FAMILIES: dict[str, tuple[str, Callable[[HFConfig], ModelSpec]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe.spec),
    "olmoe": ("OlmoeForCausalLM", olmoe.spec),
    "mixtral": ("MixtralForCausalLM", mixtral.spec),
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
    if architecture not in named:
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
