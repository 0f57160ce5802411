"""Rotary scalings: frequencies, log-probabilities and refusals, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moestro.config import Config
from moestro.engine.build import describe
from moestro.engine.models.registry import load_spec
from moestro.engine.rotary import build_rotary
from moestro.errors import ModelError
from moestro.types import Request, SamplingParams
from tests.oracle import drive, golden, tiny

CONTEXT, DIM = 64, 12  # positions of the tiny model, dimensions of its heads
LISTS: dict[str, Any] = {
    "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
    "long_factor": [1.5 + 0.9 * i for i in range(DIM // 2)],
}

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-all": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
        "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3,
    },
    "yarn-given": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32,
        "attention_factor": 0.83,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "type": "longrope", "original_max_position_embeddings": 32, "factor": 2.0, **LISTS,
    },
}  # fmt: skip
every = pytest.mark.parametrize("name", SCALINGS)


def make(folder: Path, scaling: dict[str, Any], **more: Any) -> Path:
    extra = (("rope_scaling", scaling), *more.items())
    spec = tiny.Spec("qwen3_moe", 3, layers=2, context=CONTEXT, rope_theta=100.0, extra=extra)
    return tiny.make(folder / "model", spec)


@every
@pytest.mark.parametrize("longest", [CONTEXT, 100])
def test_frequencies(name: str, longest: int, tmp_path: Path) -> None:
    folder = make(tmp_path, SCALINGS[name])
    rotary = build_rotary(load_spec(folder).rope, longest)
    config = AutoConfig.from_pretrained(folder)
    init = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
    inverse, magnitude = init(config, "cpu", seq_len=longest)
    torch.testing.assert_close(rotary.inverse, inverse, rtol=1e-6, atol=0)
    assert rotary.magnitude == pytest.approx(magnitude, rel=1e-6)


def test_lists_are_for_short_contexts_and_for_long_ones(tmp_path: Path) -> None:
    rope = load_spec(make(tmp_path, SCALINGS["longrope"])).rope
    short, long = build_rotary(rope, 32), build_rotary(rope, 33)
    plain = 100.0 ** -(torch.arange(0, DIM, 2) / DIM)
    torch.testing.assert_close(plain / short.inverse, torch.tensor(LISTS["short_factor"]))
    torch.testing.assert_close(plain / long.inverse, torch.tensor(LISTS["long_factor"]))


@pytest.mark.parametrize(
    ("name", "length"), [*((name, 90) for name in SCALINGS), ("dynamic", 30), ("longrope", 30)]
)
def test_log_probabilities(name: str, length: int, tmp_path: Path) -> None:
    """Of one sequence as long as the engine serves, past what was trained or not."""
    folder = make(tmp_path, SCALINGS[name])
    length = min(length, load_spec(folder).max_positions)
    prompt = golden.prompts(288)[-1][:length]
    want = golden.forward(golden.load(folder), prompt).log_softmax(-1)[:-2]
    request = Request("a", tuple(prompt[:-1]), SamplingParams(max_tokens=1, prompt_logprobs=1))
    with drive.engine(folder, max_model_len=length) as engine:
        found = drive.generate(engine, [request])["a"].prompt_logprobs
    assert found is not None
    got = torch.tensor([one.logprob for one in found[1:] if one is not None])
    chosen = want.gather(1, torch.tensor(prompt[1:-1])[:, None])[:, 0]
    torch.testing.assert_close(got, chosen, rtol=0, atol=1e-4)


def test_the_usual_context_is_where_frequencies_stay_the_same(tmp_path: Path) -> None:
    folder = make(tmp_path, SCALINGS["dynamic"])
    plan = describe(Config(device="cpu"), folder)
    assert plan["max_model_len"] == CONTEXT
    assert [note for note in plan["notes"] if "--max-model-len up to 128" in note]
    longer = describe(Config(device="cpu", max_model_len=128), folder)
    assert (longer["max_model_len"], longer["notes"]) == (128, ())


@pytest.mark.parametrize(
    ("scaling", "more", "words"),
    [
        ({"rope_type": "proportional"}, {}, "'proportional' is not served; served are default"),
        ({"type": "linear"}, {}, "factor"),
        ({"type": "linear", "factor": "2"}, {}, "factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3}, {}, "unknown rope keys beta_fast"),
        ({**SCALINGS["yarn"], "truncate": 1}, {}, "truncate"),
        ({**SCALINGS["llama3"], "high_freq_factor": 0.5}, {}, "high_freq_factor"),
        ({**SCALINGS["longrope"], "long_factor": [1.0]}, {}, "long_factor"),
        ({**SCALINGS["longrope"], "short_mscale": 1.1}, {}, "short_mscale"),
        ({"type": "linear", "factor": 2.0, "rope_theta": 7.0}, {}, "rope_theta has several values"),
        (
            {"type": "linear", "factor": 2.0},
            {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
            "factor has several values",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
    ],
)
def test_what_is_refused(
    scaling: dict[str, Any], more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = make(tmp_path, scaling, **more)
    with pytest.raises(ModelError, match=words):
        load_spec(folder)


def test_both_spellings_of_a_scaling(tmp_path: Path) -> None:
    old = make(tmp_path / "old", SCALINGS["yarn"])
    new = make(tmp_path / "new", SCALINGS["yarn"])
    raw = json.loads((new / "config.json").read_text())
    said = raw.pop("rope_scaling")
    raw["rope_parameters"] = {"rope_type": said.pop("type"), "rope_theta": raw.pop("rope_theta")}
    raw["rope_parameters"] |= said
    (new / "config.json").write_text(json.dumps(raw))
    assert load_spec(new) == load_spec(old)
