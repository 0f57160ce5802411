"""Writes docs/models.md from the families that are served and the checkpoints that tests compare.

Run `python -m tools.models_table` after a family or an oracle changed; a test compares the two.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from moestro.engine.gpu.blocks import missing_blocks
from moestro.engine.models.registry import FAMILIES, load_spec
from moestro.engine.models.spec import ModelSpec
from tests.oracle import families, family_golden, golden, specs, tiny

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

INTRODUCTION = f"""# Models

Made by `python -m tools.models_table`. Each family is compared with transformers in float32 on
the CPU, on tiny checkpoints of random numbers that are stored as the published ones are, and chosen
so that no token and no expert is near a tie. Published checkpoints are too large for these tests.

- **full**: `tests/models/test_parity.py` and `tests/models/test_logprobs.py`. {len(golden.LENGTHS)}
  prompts, {golden.NEW_TOKENS} greedy tokens each, equal token for token: together, alone, with 2
  expert slots, preempted, with warm prefixes, with most experts on disk; one checkpoint of each
  family also under every cache policy. Log-probabilities within 0.0001.
- **short**: `tests/models/test_families.py`. {len(family_golden.LENGTHS)} prompts,
  {family_golden.NEW_TOKENS} greedy tokens each, equal token for token: together, with warm
  prefixes, preempted with 2 expert slots and most experts on disk, and three of them alone.
  Log-probabilities within 0.0001, and the same experts for every token.

Rotary scalings are compared in `tests/engine/test_rotary.py`. Where transformers 5.24 is wrong, it
is mended first: it overlooks the base of DBRX's rotary embedding, how long a context of
Phi-3.5-MoE is, and norm_topk_prob of DeepSeek-V2 (`tests/models/test_deepseek.py`).
"""


def page() -> str:
    """The whole page."""
    rows = ["| Family (model_type) | Class | Compared | On a GPU |", "| --- | --- | --- | --- |"]
    for family, (architecture, _) in FAMILIES.items():
        full = [name for name, spec in specs.SPECS.items() if spec.family == family]
        short = [name for name, spec in families.TINY.items() if spec.family == family]
        kind, names = ("full", full) if full else ("short", short)
        count = f"{kind}, {len(names)} checkpoint{'s' if len(names) > 1 else ''}"
        lacking = _lacking(full, short)
        gpu = f"refused, lacking: {', '.join(lacking)}" if lacking else "runs"
        rows.append(f"| `{family}` | {architecture} | {count} | {gpu} |")
    return f"{INTRODUCTION}\n" + "\n".join(rows) + "\n"


def _lacking(full: list[str], short: list[str]) -> list[str]:
    """Blocks that a family's checkpoints need and a GPU lacks."""
    found: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*full, *short):
            spec = _spec(Path(folder), name)
            found |= dict.fromkeys(missing_blocks(spec))
    return list(found)


def _spec(folder: Path, name: str) -> ModelSpec:
    if name in specs.SPECS:
        tiny.dump(folder / "config.json", tiny.config(specs.SPECS[name]))
    else:
        families.write_config(folder, families.TINY[name])
    return load_spec(folder)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
