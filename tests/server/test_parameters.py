"""Public bug cases D (27-33) and 50-51: edges of parameters, seeds, and fields not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import ModelError
from moestro.server.sampling import seed_of_choice
from moestro.server.settings import GenerationDefaults
from moestro.types import Request
from tests.fakes import EOS, VOCABULARY, spelled
from tests.server.asking import refused, sampled
from tests.server.conftest import Make


async def test_case_27_null_is_absent(make: Make) -> None:
    names = (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "user"),
        *("logprobs", "logit_bias", "stream", "stream_options", "presence_penalty", "tools"),
        *("frequency_penalty", "min_tokens", "ignore_eos", "response_format", "echo", "suffix"),
    )
    nulls: dict[str, Any] = dict.fromkeys(names)
    async with make("x" * 30) as server:
        assert (await sampled(server, **nulls)).max_tokens == 16
        del nulls["echo"], nulls["suffix"]
        params = await sampled(server, "chat", **nulls, max_completion_tokens=None)
        assert params.max_tokens == 4096 - len(server.engine.opened[-1].prompt)


async def test_max_tokens_limits(make: Make) -> None:
    async with make("x") as server:
        prompt = len((await server.chat()).request.content) and len(server.engine.opened[-1].prompt)
        assert (await sampled(server, "chat", max_tokens=99999)).max_tokens == 4096 - prompt
        both = {"max_tokens": 5, "max_completion_tokens": 7}
        assert (await sampled(server, "chat", **both)).max_tokens == 7
        for name in ("max_tokens", "max_completion_tokens"):
            for value in (0, -1, 1.5, "5", True):
                assert (await refused(server, "chat", **{name: value}))["param"] == name
        assert (await sampled(server, prompt=[5] * 4095, max_tokens=99)).max_tokens == 1
        await refused(server, max_tokens=0)


@pytest.mark.parametrize(
    ("temperature", "want"),
    [(1e-4, 0.01), (1e-30, 0.0), (0, 0.0), (0.009, 0.01), (0.5, 0.5), (2, 2.0), (9e-6, 0.0)],
)
async def test_case_29_tiny_temperatures(make: Make, temperature: float, want: float) -> None:
    async with make("x") as server:
        assert (await sampled(server, temperature=temperature)).temperature == want


async def test_case_29_greedy_drops_the_filters(make: Make) -> None:
    async with make("x") as server:
        params = await sampled(server, temperature=0, top_p=0.5, top_k=1, min_p=1, seed=3)
        assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
        params = await sampled(server, top_p=1e-4, min_p=1)
        assert (params.top_p, params.min_p) == (1e-4, 1.0)
        await refused(server, temperature=0, top_p=0)


OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", True, [1]],
    "top_p": [0, -1, 1.1, "a"],
    "top_k": [0.01, -2, "5", True],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1],
    "n": [0, -1, 129, 1.5],
    "min_tokens": [-1, 17],
    "stop_token_ids": [[-1], [VOCABULARY], 5],
    "seed": [2**63, -(2**63) - 1, 1.5],
    "priority": [2**63, 10**40, "1"],
    "cache_salt": ["", "a@b", "a/b", "a\\b", "a\0b", "x" * 129, 5],
    "logprobs": [21, -1, True, 1.5],
    "stream": ["yes", 1],
    "ignore_eos": [1],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
async def test_values_out_of_range_name_the_field(make: Make, name: str) -> None:
    async with make("x") as server:
        for value in OUT_OF_RANGE[name]:
            error = await refused(server, **{name: value})
            assert error["param"] in (name, f"{name}.0")
            assert name in error["message"]


@pytest.mark.parametrize(
    ("top_k", "want"), [(-1, 0), (0, 0), (1, 1), (9999999, VOCABULARY), (None, 0)]
)
async def test_case_30_top_k(make: Make, top_k: int | None, want: int) -> None:
    async with make("x") as server:
        assert (await sampled(server, top_k=top_k)).top_k == want


async def test_case_31_logit_bias(make: Make) -> None:
    async with make("x") as server:
        for key in (str(VOCABULARY), "99999999", "-1", "abc", "1.5", "", "٣", "1" * 20):
            assert (await refused(server, logit_bias={key: 5}))["param"] == "logit_bias"
        await refused(server, logit_bias={"1": "x"})
        params = await sampled(server, logit_bias={"5": 1000, "6": -1000, "7": 1})
        assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 1.0}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
LATER: list[dict[str, Any]] = [
    {"tools": [TOOL]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"functions": [{}]},
    {"function_call": {"name": "f"}},
    {"suffix": "x"},
    {"use_beam_search": True},
    {"best_of": 3},
    {"best_of": True},
    {"logprob_token_ids": [1]},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [1]},
    {"truncate_prompt_tokens": 5},
    {"prompt_logprobs": 1},
    {"chat_template": "x"},
    {"documents": [{}]},
    {"audio": {}},
    {"modalities": ["audio"]},
    {"thinking_token_budget": 5},
    {"prompt_embeds": "x"},
]


@pytest.mark.parametrize("fields", LATER, ids=lambda f: next(iter(f)))
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_what_is_not_served_is_refused_by_name(
    make: Make, path: str, fields: dict[str, Any]
) -> None:
    async with make("x") as server:
        (name,) = fields
        error = await refused(server, path, **fields)
        assert error["param"] == name
        assert name in error["message"]


async def test_what_asks_for_nothing_passes(make: Make) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "suffix": "",
        "use_beam_search": False,
        "logprob_token_ids": [],
        "modalities": ["text"],
        "include_reasoning": True,
        "functions": None,
    }
    async with make("x") as server:
        for path in ("chat", "complete"):
            await sampled(server, path, **nothing)
        await sampled(server, "complete", n=2, best_of=2)
        assert (await refused(server, "chat", best_of=1))["param"] == "best_of"


async def test_hints_and_unknown_fields_pass_and_warn_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    hints = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    async with make("x") as server:
        await sampled(server, "chat", **hints)
        assert "unknown" not in caplog.text
        for _ in range(3):
            await sampled(server, "chat", frobnicate=1, **{"secret text!": 2})
        assert caplog.text.count("frobnicate") == 1
        assert "secret" not in caplog.text
        for i in range(400):
            server.app.state.service.unknown.note(f"key{i}")
        assert len(server.app.state.service.unknown._seen) <= 256


async def test_defaults_of_the_checkpoint(make: Make) -> None:
    defaults = GenerationDefaults(0.6, 0.9, 20, 0.05, 1.1, (EOS, 7))
    async with make("x", settings={"defaults": defaults}) as server:
        params = await sampled(server)
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
        assert (params.min_p, params.repetition_penalty) == (0.05, 1.1)
        assert params.eos_token_ids == (EOS, 7)
        params = await sampled(server, temperature=1, top_p=1, top_k=0, min_p=0)
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1, 0, 0)
        assert (await sampled(server, ignore_eos=True)).eos_token_ids == ()


def test_generation_config_is_read(tmp_path: Path) -> None:
    assert GenerationDefaults.from_checkpoint(tmp_path) == GenerationDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, 2], "top_k": 5, "temperature": 1}))
    want = GenerationDefaults(temperature=1.0, top_k=5, eos_token_ids=(1, 2))
    assert GenerationDefaults.from_checkpoint(tmp_path) == want
    path.write_text(json.dumps({"eos_token_id": 3}))
    assert GenerationDefaults.from_checkpoint(tmp_path).eos_token_ids == (3,)
    for broken in ("{", "[]", '{"top_k": 1.5}', '{"eos_token_id": "a"}', '{"temperature": true}'):
        path.write_text(broken)
        with pytest.raises(ModelError, match="generation_config"):
            GenerationDefaults.from_checkpoint(tmp_path)


async def test_all_fields_reach_the_engine(make: Make) -> None:
    async with make("x") as server:
        fields: dict[str, Any] = {
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "max_tokens": 9,
            "stop_token_ids": [8, 8, 9],
            "priority": -3,
            "cache_salt": "s",
            "logprobs": 4,
        }
        params = await sampled(server, **fields)
        assert params.presence_penalty == 0.5
        assert params.frequency_penalty == -0.5
        assert params.repetition_penalty == 1.2
        assert (params.min_tokens, params.max_tokens) == (2, 9)
        assert params.stop_token_ids == (8, 9)
        assert params.logprobs == 4
        assert params.prompt_logprobs is None
        request = server.engine.opened[-1]
        assert (request.priority, request.cache_salt) == (-3, "s")


def by_seed(request: Request) -> list[int]:
    return spelled(f"{request.sampling.seed:016x}")


async def test_case_50_seeds(make: Make) -> None:
    async with make(by_seed) as server:
        assert (await sampled(server)).seed != (await sampled(server)).seed
        assert (await sampled(server, seed=-1)).seed != (await sampled(server, seed=-1)).seed
        assert (await sampled(server, seed=None)).seed != (await sampled(server, seed=None)).seed
        first = await sampled(server, seed=7)
        assert first.seed == (await sampled(server, seed=7)).seed
        assert 0 <= first.seed < 2**64
        assert (await sampled(server, seed=2**63 - 1)).seed != first.seed
        assert (await sampled(server, seed=-5)).seed >= 0


@pytest.mark.parametrize("stream", [False, True])
async def test_case_51_choices_differ_and_the_set_repeats(make: Make, stream: bool) -> None:
    async with make(by_seed) as server:

        async def texts(**fields: Any) -> list[str]:
            fields |= {"n": 4, "temperature": 1, "max_tokens": 20}
            if stream:
                events = await server.complete_events(**fields)
                return [events.text(i) for i in range(4)]
            return [c["text"] for c in (await server.complete(**fields)).json()["choices"]]

        assert len(set(await texts())) == 4
        seeded = await texts(seed=7)
        assert len(set(seeded)) == 4
        assert await texts(seed=7) == seeded
        assert await texts(seed=8) != seeded


@given(st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_seeds_of_choices_are_spread(seed: int) -> None:
    seeds = [seed_of_choice(seed, i) for i in range(128)]
    assert len(set(seeds)) == 128
    assert all(0 <= s < 2**64 for s in seeds)
