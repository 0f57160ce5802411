"""Which building blocks of a model the CUDA path cannot run yet.

Owns: the list, so that such a model is refused before it is loaded. A block that gets its kernels
is taken out here.
"""

from __future__ import annotations

from moestro.engine.models.router import SoftmaxTopK
from moestro.engine.models.spec import ModelSpec, Norm
from moestro.errors import ModelError


def missing_blocks(spec: ModelSpec, magnitude: float) -> tuple[str, ...]:
    """What `spec` needs and the kernels do not have; empty when it can run. `magnitude`: the factor
    on its rotary embedding."""
    moe = spec.moe
    lacking = {
        f"router {type(moe.router).__name__}": not isinstance(moe.router, SoftmaxTopK),
        "shared experts": moe.shared is not None,
        f"norm {spec.norm.value}": spec.norm is not Norm.RMS,
        "bias of the head": spec.head_bias,
        "embedding multiplier": spec.embedding_scale != 1.0,
        "residual multiplier": spec.residual_scale != 1.0,
        "logits divisor": spec.logits_divisor != 1.0,
        f"rotary scaling {type(spec.rope.scaling).__name__} with a magnitude": magnitude != 1.0,
    }
    return tuple(block for block, lacks in lacking.items() if lacks)


def check_blocks(spec: ModelSpec, magnitude: float) -> None:
    """ModelError that names every missing block."""
    lacking = missing_blocks(spec, magnitude)
    if lacking:
        raise ModelError(
            f"{spec.family} does not run on CUDA devices yet, which lack: {', '.join(lacking)}; "
            "--device cpu serves it"
        )
