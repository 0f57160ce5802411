"""Which building blocks of a model the CUDA path cannot run yet.

Owns: the list, so that such a model is refused before it is loaded. A block that gets its kernels
is taken out here.
"""

from __future__ import annotations

from moestro.engine.models.router import (
    BiasedTopK,
    GroupedSoftmax,
    SoftmaxTopK,
    SparseMixer,
    TopKSoftmax,
)
from moestro.engine.models.spec import AttentionSpec, ModelSpec
from moestro.errors import ModelError
from moestro.expert_cache.layout import ExpertLayout
from moestro.kernels.gpu.packed import unsupported

ROUTERS = (SoftmaxTopK, TopKSoftmax, BiasedTopK, GroupedSoftmax, SparseMixer)


def missing_blocks(spec: ModelSpec) -> tuple[str, ...]:
    """What `spec` needs and the kernels do not have; empty when it can run."""
    lacking = [
        f"attention {type(layer.attention).__name__}"
        for layer in spec.layers
        if not isinstance(layer.attention, AttentionSpec)
    ]
    if type(spec.moe.router) not in ROUTERS:
        lacking.append(f"router {type(spec.moe.router).__name__}")
    return tuple(dict.fromkeys(lacking))


def check_format(layout: ExpertLayout) -> None:
    """ModelError when the kernels cannot read experts in this format."""
    if layout.format is not None and (lacking := unsupported(layout.format)):
        raise ModelError(
            f"experts in {layout.format.name} do not run on CUDA devices with {lacking}; "
            "--device cpu serves them"
        )


def check_blocks(spec: ModelSpec) -> None:
    """ModelError that names every missing block."""
    lacking = missing_blocks(spec)
    if lacking:
        raise ModelError(
            f"{spec.family} does not run on CUDA devices yet, which lack: {', '.join(lacking)}; "
            "--device cpu serves it"
        )
