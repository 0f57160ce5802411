"""Quantised matrices among the dense weights, put together from the tensors they are stored in.

Owns: the step from raw bytes of several tensors to one packed matrix. Does not own: which tensors
these are (`engine.quantized`) or how they are read (`engine.tensor_reader`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moestro.engine.quantized import Piece
from moestro.expert_cache.repack import REPACK
from moestro.kernels.formats import Format
from moestro.kernels.packed import PackedMatrix, view


def assemble_matrix(
    form: Format, n: int, k: int, pieces: Sequence[Piece], raw: Mapping[str, torch.Tensor]
) -> PackedMatrix:
    """The matrix [n, k] of `pieces`; `raw` has the bytes of each of their tensors, uint8, by name.
    It is on the device where these are."""
    device = next(iter(raw.values())).device
    data = torch.zeros(form.nbytes(n, k), dtype=torch.uint8, device=device)
    fields = {field.name: field for field in form.fields(n, k)}
    for piece in pieces:
        field, found = fields[piece.field], raw[piece.ref.name]
        if piece.repack:
            turned = REPACK[piece.repack](found.cpu().numpy(), field.shape[0])
            found = torch.from_numpy(turned).to(device)
        view(data, field).view(torch.uint8).view(-1).copy_(found)
    return PackedMatrix(form, n, k, data)
