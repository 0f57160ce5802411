"""A long context costs windowed layers a window; text is the same however its prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.config import Config
from moestro.engine import build
from moestro.engine.memory import plan_memory
from moestro.engine.models.registry import load_spec
from moestro.kv_cache.prefix import GONE
from moestro.types import Request, SamplingParams
from tests.oracle import drive, families, family_golden

WINDOW, BLOCK, RUN = 24, 8, 32  # tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.make(tmp_path_factory.mktemp("gpt") / "oss", families.TINY["gpt-oss"])


def held(engine: Any, id: str) -> list[int]:
    """Tokens of the blocks that each group of layers holds for a sequence."""
    kv = engine._kv
    tables = (kv.table(id), *kv.further_tables(id)) if id in kv.holders() else ()
    return [BLOCK * sum(block != GONE for block in table) for table in tables]


def test_a_context_of_many_windows(folder: Path) -> None:
    """450 tokens, computed 32 at a time, with room for little more than one sequence."""
    prompt = tuple((family_golden.prompts(288)[-1] * 5)[:450])
    whole = {"max_sweep_tokens": 8192, "enable_prefix_caching": False}
    with drive.engine(folder, **whole) as engine:
        want = drive.generate(engine, [drive.greedy("a", prompt, 30, logprobs=1)])["a"]
    cut: dict[str, Any] = {"max_sweep_tokens": RUN, "block_size": BLOCK, "kv_cache_tokens": 480}
    with drive.engine(folder, **cut) as engine:
        assert engine.stats().kv.blocks == 480 // BLOCK + 2 * ((RUN + WINDOW) // BLOCK + 1)
        engine.add(drive.greedy("a", prompt, 30, logprobs=1))
        tokens, most, decoding = [], 0, 0
        for _ in range(10_000):
            for event in engine.step():
                tokens += event.token_ids
            for group, kind in zip(held(engine, "a"), engine._kv._kinds, strict=False):
                if kind.keeps_all:
                    continue
                most = max(most, group)
                decoding = max(decoding, group if tokens else 0)
            if engine.idle:
                break
        assert 0 < decoding <= WINDOW + BLOCK
        assert WINDOW < most <= WINDOW + RUN + BLOCK
        again = drive.generate(engine, [drive.greedy("b", prompt, 30, logprobs=1)])["b"]
        assert engine.stats().kv.prefix_hits == 448  # all but the last block, with its window
    assert tokens == want.tokens == again.tokens
    assert [one.logprob for one in again.logprobs] == pytest.approx(
        [one.logprob for one in want.logprobs], abs=1e-4
    )


def test_the_plan_pays_for_windows_only(folder: Path) -> None:
    """One layer of three sees all; blocks serve one layer each, so that none is left half empty."""
    spec = load_spec(folder)
    config = Config(kv_cache_tokens=500, block_size=BLOCK, max_sweep_tokens=RUN)
    layout = build.open_files(config, spec, folder).layout("float32")
    plan = plan_memory(spec, layout, config, 8 << 30)
    keeps = plan_memory(spec, layout, config, 8 << 30, windows=False)
    assert [len(group.layers) for group in plan.groups.groups] == [1, 1, 1]
    assert (keeps.kv, plan.kv) == (63 * BLOCK * 3 * 256, (63 + 2 * 8) * BLOCK * 256)
    assert plan.kv_tokens == keeps.kv_tokens == 504
    assert plan.max_model_len == keeps.max_model_len == 500 + 4
    short = config.model_copy(update={"max_model_len": WINDOW})
    assert plan_memory(spec, layout, short, 8 << 30).groups == keeps.groups  # nothing to give back


def test_biases_stay_plain_beside_quantised_experts(folder: Path) -> None:
    tokens = tuple(family_golden.prompts(288)[-1])
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = []
    for kept in ("auto", "fp8"):
        with drive.engine(folder, expert_dtype=kept) as engine:
            scores = drive.generate(engine, [Request("a", tokens, sampling)])["a"].prompt_logprobs
        assert scores is not None
        found.append(torch.tensor([one.logprob for one in scores[1:] if one is not None]))
    assert 0 < float((found[0] - found[1]).abs().median()) < 0.25
