"""A step's input, taken apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moestro.kernels.gpu.prepare import Lines, Prepared, prepare

LINES = Lines(
    token=0, source=1, position=2, place=3, column=4, block=5, temperature=6, top_k=7, rows=8
)
HIDDEN, VOCAB, MOST, ROWS = 2100, 11, 6, 4


@pytest.mark.parametrize("scale", [1.0, 12.5])
def test_prepare(device: str, dtype: torch.dtype, scale: float) -> None:
    given = np.zeros((9, MOST), np.int64)
    given[LINES.token, :ROWS] = [3, 9, 4, 0]
    given[LINES.source, :ROWS] = [-1, 2, -1, -1]
    given[LINES.position, :ROWS] = [5, 0, 100, 0]
    given[LINES.place, :ROWS] = [7, 0, 1 << 40, -1]
    given[LINES.column, :ROWS] = [2, 4, 0, 4]
    given[LINES.block, :ROWS] = [70, 71, 72, 73]
    given[LINES.temperature, :ROWS] = np.array([0.0, 0.7, 1.5, 0.0]).view(np.int64)
    given[LINES.top_k, :ROWS] = [0, 5, 1, 0]
    given[LINES.rows, 0] = 3
    sampled = torch.tensor([1, 2, 10, 4, 5, 6], device=device)
    embedding = torch.randn(VOCAB, HIDDEN, device=device).to(dtype)
    tables = torch.full((MOST, 5), -7, dtype=torch.int32, device=device)
    out = Prepared(
        torch.full((ROWS, HIDDEN), torch.nan, dtype=dtype, device=device),
        torch.full((ROWS,), -7, dtype=torch.int32, device=device),
        torch.full((ROWS,), torch.nan, device=device),
        torch.full((ROWS,), -7, dtype=torch.int32, device=device),
        torch.full((1,), -7, dtype=torch.int32, device=device),
    )
    lines = torch.from_numpy(given).to(device)
    prepare(lines, LINES, sampled, embedding, tables, out=out, scale=scale)
    assert torch.equal(out.residual, embedding[[3, 10, 4, 0]] * scale)
    assert out.lengths.tolist() == [6, 1, 101, 0]
    assert torch.equal(out.temperature.cpu(), torch.tensor([0.0, 0.7, 1.5, 0.0]))
    assert out.top_k.tolist() == [0, 5, 1, 0]
    assert out.rows.tolist() == [3]
    expected = torch.full((MOST, 5), -7, dtype=torch.int32)
    for row, (column, block) in enumerate([(2, 70), (4, 71), (0, 72), (4, 73)]):
        expected[row, column] = block
    assert torch.equal(tables.cpu(), expected)
