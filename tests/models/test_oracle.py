"""The oracle itself: every checkpoint is far from ties, and transformers took all its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle import specs, tiny
from tests.oracle.golden import LENGTHS, NEW_TOKENS, Golden

Goldens = Callable[[str], Golden]


@pytest.mark.parametrize("name", specs.SPECS)
def test_no_decision_of_the_oracle_is_near_a_tie(name: str, golden: Goldens) -> None:
    made = golden(name)
    assert specs.weakness(made) is None
    assert [len(case.prompt) for case in made.cases] == list(LENGTHS)
    assert {len(case.tokens) for case in made.cases} == {NEW_TOKENS}


def test_every_family_has_at_least_five_checkpoints() -> None:
    counts = Counter(spec.family for spec in specs.SPECS.values())
    assert set(counts) == set(tiny.FAMILIES)
    assert min(counts.values()) >= 5
    assert {specs.SPECS[name].family for name in specs.FULL_MATRIX} == set(tiny.FAMILIES)


def test_a_spec_alone_decides_the_bytes(tmp_path: Path) -> None:
    spec = specs.SPECS["qwen3"]
    one, same = tiny.make(tmp_path / "one", spec), tiny.make(tmp_path / "same", spec)
    other = tiny.make(tmp_path / "other", replace(spec, seed=spec.seed + 1))
    weights = "model.safetensors"
    assert (one / weights).read_bytes() == (same / weights).read_bytes()
    assert (one / weights).read_bytes() != (other / weights).read_bytes()
