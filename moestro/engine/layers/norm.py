"""The norm of a model's residual stream.

Owns: which op each kind of norm is. Query and key norms are `attention`'s.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moestro.engine.models.spec import Norm
from moestro.kernels import reference as ops


def apply_norm(
    kind: Norm, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x [T, hidden] normed over hidden; `bias` only with `Norm.LAYER`."""
    if kind is Norm.RMS:
        return ops.rms_norm(x, weight, eps)
    if kind is Norm.RMS_WIDE:
        return ops.rms_norm(x.float(), weight.float(), eps).to(x.dtype)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
