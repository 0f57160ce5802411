"""Find, for every row of `specs.SPECS`, the first seed that makes it an oracle; print them.

    python -m tests.oracle.find_seeds [NAME ...]

Owns: the search only. Paste the seeds into `specs`; the tests check that they hold.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.oracle import golden, specs, tiny

TRIES = 2000


class _TooClose(Exception):
    """A step was too near a tie: this seed is not worth finishing."""


class _Watch:
    """A logits processor that gives up at the first near tie."""

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Look at the scores [rows, vocab] of one step and hand them on."""
        if golden.margin(scores) < specs.LOGIT_MARGIN:
            raise _TooClose
        return scores


def main(names: list[str]) -> None:
    """Search for each of `names`, or for all."""
    for name in names or specs.SPECS:
        print(name, search(specs.SPECS[name]), flush=True)


def search(spec: tiny.Spec) -> int | None:
    """The first seed that satisfies `specs.weakness`."""
    for seed in range(TRIES):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = tiny.make(Path(folder), replace(spec, seed=seed))
            if _worth_finishing(golden.load(checkpoint)) and _good(checkpoint):
                return seed
    return None


def _worth_finishing(model: Any) -> bool:
    try:
        asked = golden.prompts(model.config.vocab_size)
        golden.generate(model, asked, golden.NEW_TOKENS, watch=_Watch())
    except _TooClose:
        return False
    return True


def _good(checkpoint: Path) -> bool:
    try:
        return specs.weakness(golden.compute(checkpoint)) is None
    except golden.NearTie:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
