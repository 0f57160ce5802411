"""The newest `openai` client and curl against a server whose answers transformers knows."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.oracle import vocabulary
from tests.oracle.golden import Case, Golden
from tests.oracle.serving import Served, serve

NAME = "qwen3"
PAST_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "clients.log"
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "--expert-slots", "12")
    with serve(checkpoint(NAME), *flags, log=log) as served:
        yield served
        served.wait_idle()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def cases(golden: Callable[[str], Golden]) -> tuple[Case, ...]:
    return golden(NAME).cases


def text(tokens: tuple[int, ...]) -> str:
    """What a client sees of tokens: special tokens and ids past the tokenizer have no text."""
    first, last = vocabulary.FIRST_BYTE, vocabulary.FIRST_BYTE + 256
    data = bytes(t - first for t in tokens if first <= t < last)
    return data.decode("utf-8", errors="replace")


def test_completion_is_transformers_text(client: openai.OpenAI, cases: tuple[Case, ...]) -> None:
    case = cases[7]
    answer = client.completions.create(
        model="tiny", prompt=list(case.prompt), max_tokens=64, temperature=0, extra_body=PAST_EOS
    )
    assert answer.choices[0].text == text(case.tokens)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(case.prompt)
    assert answer.usage.completion_tokens == 64
    assert answer.model == "tiny"


async def test_all_prompts_at_once_by_async_streams(
    served: Served, cases: tuple[Case, ...]
) -> None:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:

        async def one(case: Case) -> str:
            stream = await client.completions.create(
                model="tiny",
                prompt=list(case.prompt),
                max_tokens=64,
                temperature=0,
                stream=True,
                extra_body=PAST_EOS,
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*map(one, cases))
    assert texts == [text(case.tokens) for case in cases]


def test_several_prompts_in_one_call(client: openai.OpenAI, cases: tuple[Case, ...]) -> None:
    asked = cases[3:6]
    answer = client.completions.create(
        model="tiny",
        prompt=[list(case.prompt) for case in asked],
        max_tokens=64,
        temperature=0,
        extra_body=PAST_EOS,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [text(case.tokens) for case in asked]


def test_logprobs_are_transformers(client: openai.OpenAI, cases: tuple[Case, ...]) -> None:
    case = cases[5]
    answer = client.completions.create(
        model="tiny",
        prompt=list(case.prompt),
        max_tokens=64,
        temperature=0,
        logprobs=2,
        echo=True,
        extra_body=PAST_EOS,
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    values: list[float | None] = list(found.token_logprobs)
    assert values[0] is None
    assert values[1:] == pytest.approx(case.logprobs, abs=1e-4)


def test_chat_streams_what_it_says_at_once(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is a lighthouse?"}]
    settings = {
        "model": "tiny",
        "messages": messages,
        "seed": 5,
        # The helper raises when the length ends a text, so let a seventh of all tokens end it.
        "extra_body": {"stop_token_ids": list(range(10, 50))},
    }
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    with client.chat.completions.stream(**settings, logprobs=True, top_logprobs=3) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    streamed, at_once = final.choices[0].logprobs, whole.choices[0].logprobs
    assert streamed is not None
    assert streamed.content is not None
    assert [one.token for one in streamed.content] == [one.token for one in at_once.content]
    assert {len(one.top_logprobs) for one in streamed.content} == {3}


def test_choices_differ_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    def ask(**more: object) -> list[str]:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            n=3,
            max_tokens=20,
            temperature=1,
            **more,  # type: ignore[call-overload]
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask(seed=7)
    assert len(set(first)) == 3
    assert ask(seed=7) == first
    assert ask(seed=8) != first


def test_n_choices_streamed(client: openai.OpenAI) -> None:
    settings = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 1}
    whole = client.chat.completions.create(**settings, max_tokens=20)  # type: ignore[call-overload]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**settings, max_tokens=20, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_statuses_even_of_streams(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="tinny", prompt="x", stream=stream)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 513, stream=stream)
    assert long.value.code == "context_length_exceeded"
    assert "512" in str(long.value)
    with pytest.raises(openai.BadRequestError) as empty:
        client.completions.create(model="tiny", prompt=[], stream=stream)
    assert empty.value.param == "prompt"


def test_the_limit_of_the_context_is_exact(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="x" * 511, max_tokens=50)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"


def curl(served: Served, path: str, *arguments: str) -> bytes:
    """What curl prints."""
    command = ["curl", "-sS", "--max-time", "30", f"{served.url}{path}", *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


def test_curl(served: Served) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5})
    json_type = ("-H", "content-type: application/json")
    answer = json.loads(curl(served, "/chat/completions", *json_type, "-d", body))
    assert answer["object"] == "chat.completion"
    stream = json.dumps(json.loads(body) | {"stream": True})
    shown = curl(served, "/chat/completions", "-N", *json_type, "-d", stream)
    assert shown.startswith(b"data: {")
    assert shown.endswith(b"data: [DONE]\n\n")


def test_curl_with_a_body_that_is_not_utf8(served: Served) -> None:
    body = '{"messages":[{"role":"user","content":"\udcc4\udce3"}]}'
    shown = curl(
        served, "/chat/completions", "--data-binary", body, "-H", "content-type: application/json"
    )
    assert json.loads(shown)["error"]["type"] == "invalid_request_error"
