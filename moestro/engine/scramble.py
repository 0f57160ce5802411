"""A sampler whose tokens are scrambled, for benchmarks on random weights.

Owns: where scrambling meets sampling. The formula is `synthetic.scrambled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moestro.engine.sampler import Sampler
from moestro.engine.synthetic import row_number, scrambled
from moestro.scheduler.plan import Sampled


class ScramblingSampler(Sampler):
    """Chooses as `Sampler` does, then hands another id on."""

    def sample(
        self, ids: Sequence[str], indexes: Sequence[int], logits: torch.Tensor
    ) -> list[Sampled]:
        """One token a row, scrambled."""
        vocab = logits.shape[-1]
        found = super().sample(ids, indexes, logits)
        return [
            replace(one, token=scrambled(one.token, index, row_number(one.id), vocab))
            for one, index in zip(found, indexes, strict=True)
        ]
