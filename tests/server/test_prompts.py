"""Public bug cases 26, 34 and 42: prompts, echo and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import VOCABULARY, info, spelled
from tests.server.asking import refused
from tests.server.conftest import Make


@pytest.mark.parametrize("prompt", [[""], "", [], [[]], None, [[], [5]], ["a", ""]])
async def test_case_26_an_empty_prompt_is_refused(make: Make, prompt: Any) -> None:
    async with make("x") as server:
        error = await refused(server, prompt=prompt)
        assert error["param"] == "prompt"
        assert (await server.complete()).status_code == 200


async def test_case_26_bos_makes_a_prompt(make: Make) -> None:
    async with make("x", bos=True) as server:
        assert (await server.complete(prompt="")).status_code == 200
        assert server.engine.opened[-1].prompt == (0,)
        assert (await server.complete(prompt=[])).status_code == 400
        await refused(server, prompt="", add_special_tokens=False)


async def test_case_26_messages(make: Make) -> None:
    async with make("x") as server:
        assert (await refused(server, "chat", messages=[]))["param"] == "messages"
        empty = [{"role": "user", "content": ""}]
        assert (await server.chat(messages=empty)).status_code == 200


async def test_case_26_a_template_that_writes_nothing(make: Make) -> None:
    async with make("x", template="{{- '' }}") as server:
        await refused(server, "chat")


async def test_case_34_logprobs_and_top_logprobs(make: Make) -> None:
    async with make("x") as server:
        body = (await server.chat(logprobs=True)).json()
        entry = body["choices"][0]["logprobs"]["content"][0]
        assert entry["top_logprobs"] == []
        assert entry["token"] == "x"
        body = (await server.chat(logprobs=True, top_logprobs=3)).json()
        assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
        assert (await server.chat(top_logprobs=0)).json()["choices"][0]["logprobs"] is None
        for fields in (
            {"top_logprobs": 5},
            {"top_logprobs": 5, "logprobs": False},
            {"logprobs": True, "top_logprobs": 21},
            {"logprobs": True, "top_logprobs": -1},
        ):
            assert (await refused(server, "chat", **fields))["param"] == "top_logprobs"
        assert (await refused(server, "chat", logprobs=5))["param"] == "logprobs"


async def test_completions_logprobs(make: Make) -> None:
    async with make("xyz") as server:
        found = (await server.complete(logprobs=2)).json()["choices"][0]["logprobs"]
        assert found["tokens"] == ["x", "y", "z"]
        assert found["text_offset"] == [0, 1, 2]
        assert all(2 <= len(top) <= 3 for top in found["top_logprobs"])
        cut = (await server.complete(logprobs=0, stop="yz")).json()["choices"][0]
        assert (cut["text"], cut["logprobs"]["text_offset"]) == ("x", [0, 1, 1])
        found = (await server.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        assert [list(top) for top in found["top_logprobs"]] == [["x"], ["y"], ["z"]]
        spelled_out = await server.complete(logprobs=0, return_tokens_as_token_ids=True)
        tokens = spelled_out.json()["choices"][0]["logprobs"]["tokens"]
        assert tokens == [f"token_id:{token}" for token in spelled("xyz")]


async def test_equal_spellings_keep_the_likelier(make: Make) -> None:
    # Both ids are outside the tokenizer's vocabulary, so both spell nothing.
    async with make([VOCABULARY - 2]) as server:
        found = (await server.complete(logprobs=2, max_tokens=1)).json()["choices"][0]["logprobs"]
        assert found["top_logprobs"] == [{"": found["token_logprobs"][0]}]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(make: Make, stream: bool) -> None:
    async with make("yz") as server:

        async def text(**fields: Any) -> str:
            if stream:
                return (await server.complete_events(echo=True, **fields)).text()
            return str((await server.complete(echo=True, **fields)).json()["choices"][0]["text"])

        assert await text(prompt="wx") == "wxyz"
        assert await text(prompt=spelled("wx")) == "wxyz"
        assert await text(prompt="wx", max_tokens=0) == "wx"
        assert await text(prompt="wx", max_tokens=1) == "wxy"


async def test_echo_with_logprobs(make: Make) -> None:
    async with make("yz", bos=True) as server:
        fields = {"prompt": "wé", "echo": True, "logprobs": 1}
        choice = (await server.complete(**fields)).json()["choices"][0]
        found = choice["logprobs"]
        assert choice["text"] == "wéyz"
        assert found["tokens"] == ["<|bos|>", "w", "bytes:\\xc3", "bytes:\\xa9", "y", "z"]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert found["text_offset"] == [0, 0, 1, 1, 2, 3]
        events = await server.complete_events(**fields)
        parts = [c["logprobs"] for c in events.of(0) if c["logprobs"]]
        for key in found:
            assert [item for part in parts for item in part[key]] == found[key]
        only = (await server.complete(**fields, max_tokens=0)).json()
        assert only["choices"][0]["logprobs"]["tokens"] == found["tokens"][:4]
        assert only["choices"][0]["finish_reason"] == "length"
        assert only["usage"]["completion_tokens"] == 0


async def test_echo_of_several_prompts_and_choices(make: Make) -> None:
    async with make("z") as server:
        fields = {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 0}
        choices = (await server.complete(**fields)).json()["choices"]
        assert [c["text"] for c in choices] == ["az", "az", "bz", "bz"]
        events = await server.complete_events(**fields)
        assert [events.text(i) for i in range(4)] == ["az", "az", "bz", "bz"]
        for index in range(4):
            found = [t for c in events.of(index) if c["logprobs"] for t in c["logprobs"]["tokens"]]
            assert found == choices[index]["logprobs"]["tokens"]


async def test_the_four_shapes_of_a_prompt(make: Make) -> None:
    async with make("x") as server:
        for prompt, want in (
            ("ab", [spelled("ab")]),
            (["ab", "c"], [spelled("ab"), spelled("c")]),
            (spelled("ab"), [spelled("ab")]),
            ([spelled("ab"), [5]], [spelled("ab"), [5]]),
        ):
            before = len(server.engine.opened)
            body = (await server.complete(prompt=prompt)).json()
            assert [list(r.prompt) for r in server.engine.opened[before:]] == want
            assert len(body["choices"]) == len(want)
        error = await refused(server, prompt=[5, 5, "a", *[5] * 5000])
        assert error["code"] == "context_length_exceeded"
        broken: list[Any] = [[1, "a"], ["a", [1]], [[1], 2], {"a": 1}, 5, [True], [1.5], [None]]
        broken += [[["a"]], [VOCABULARY], [-1], [[5], [VOCABULARY]]]
        for shape in broken:
            assert (await refused(server, prompt=shape))["param"] == "prompt"
        await refused(server, prompt=["a"] * 1025)


async def test_a_prompt_of_the_kv_pool_is_refused_by_the_engine(make: Make) -> None:
    async with make("x", engine={"limits": info(kv_tokens=32)}) as server:
        assert (await server.complete(prompt=[5] * 31)).status_code == 200
        error = await refused(server, prompt=[5] * 32)
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("length", [4094, 4095, 4096, 4097])
async def test_case_42_prompts_at_the_limit(make: Make, length: int) -> None:
    async with make("x") as server:
        response = await server.complete(prompt=[5] * length)
        assert response.status_code == (200 if length < 4096 else 400)
