"""Real client packages beside openai's, and requests shaped as benchmark tools send them.

LiteLLM weighs over 130 MB, so it is here by the shape of its requests only.
"""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.server.conftest import Make, Server, Setup, on_socket, saying
from tests.server.sse import events_of
from tests.server.test_tools import ARGUMENTS, QWEN, SAID, TOOL

TEXT = "Hello, wörld 😀!"
LENGTH = len(TEXT.encode()) + 1  # tokens, the end included


# LangChain


MakeModel = Callable[..., Any]


@pytest_asyncio.fixture
async def langchain() -> AsyncIterator[MakeModel]:
    """A function: the model of a server, with connections that are closed at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI  # late: it takes its time
    async with httpx.AsyncClient() as client:
        with httpx.Client() as blocking:

            def make(server: Server, **fields: Any) -> Any:
                return ChatOpenAI(
                    model="tiny",
                    base_url=server.url,
                    api_key="none",
                    max_retries=0,
                    http_async_client=client,
                    http_client=blocking,
                    **fields,
                )

            yield make


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with on_socket(Setup(saying(TEXT), engine={"per_step": 2})) as running:
        yield running
        await running.idle()


async def test_langchain_invoke(langchain: MakeModel, server: Server) -> None:
    model = langchain(server, temperature=0.5, seed=3, max_tokens=50, stop=["zzz"])
    answer = await model.ainvoke([("system", "Be brief."), ("human", "hi")])
    assert answer.content == TEXT
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "tiny"
    assert answer.usage_metadata["output_tokens"] == LENGTH
    sampling = server.engine.opened[0].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 50)


async def test_langchain_stream(langchain: MakeModel, server: Server) -> None:
    model = langchain(server, stream_usage=True, logprobs=True, top_logprobs=2)
    chunks = [chunk async for chunk in model.astream("hi")]
    assert len([chunk for chunk in chunks if chunk.content]) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk  # raises where chunks cannot be merged
    assert whole.content == TEXT
    assert whole.usage_metadata["output_tokens"] == LENGTH
    assert whole.response_metadata["finish_reason"] == "stop"
    assert len(whole.response_metadata["logprobs"]["content"]) == LENGTH - 1


async def test_langchain_batch_and_blocking(langchain: MakeModel, server: Server) -> None:
    model = langchain(server)
    answers = await asyncio.to_thread(model.batch, ["a", "b", "c"])
    assert [answer.content for answer in answers] == [TEXT] * 3
    parts = await asyncio.to_thread(lambda: [part.content for part in model.stream("hi")])
    assert "".join(parts) == TEXT


async def test_langchain_errors(langchain: MakeModel, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="from 0 to 2"):
        await langchain(server, temperature=9).ainvoke("hi")
    with pytest.raises(Exception, match="maximum context length"):
        await langchain(server).ainvoke("x" * 5000)


async def test_langchain_tools(langchain: MakeModel, listen: Make) -> None:
    async with listen(SAID, template=QWEN, engine={"per_step": 3}) as server:
        model = langchain(server).bind_tools([TOOL], tool_choice="auto")
        wanted = [("weather", json.loads(ARGUMENTS))] * 2
        answer = await model.ainvoke("hi")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == wanted
        assert answer.invalid_tool_calls == []
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        chunks = [chunk async for chunk in model.astream("hi")]
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == wanted
        assert whole.content == answer.content == "Let me look."
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "wet"}
        again = await model.ainvoke([("human", "hi"), answer, result])
        assert len(again.tool_calls) == 2


# Requests as other clients send them

MESSAGES = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
USAGE = {"include_usage": True}
GUIDELLM = {"include_usage": True, "continuous_usage_stats": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BENCHMARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm openai": (
        COMPLETIONS,
        {
            "prompt": "hello",
            "repetition_penalty": 1.0,
            "max_tokens": 5,
            "logprobs": None,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    "vllm openai, token ids and sampling": (
        COMPLETIONS,
        {
            "prompt": [40, 41, 42],
            "repetition_penalty": 1.0,
            "max_tokens": 5,
            "logprobs": None,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
            "temperature": 0.0,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
        },
    ),
    "vllm openai-chat": (
        CHAT,
        {
            "messages": PARTS,
            "max_completion_tokens": 5,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    "guidellm completions": (
        COMPLETIONS,
        {
            "stream": True,
            "stream_options": GUIDELLM,
            "max_tokens": 5,
            "stop": None,
            "ignore_eos": True,
            "prompt": "hello there",
        },
    ),
    "guidellm chat": (
        CHAT,
        {
            "stream": True,
            "stream_options": GUIDELLM,
            "max_completion_tokens": 5,
            "stop": None,
            "ignore_eos": True,
            "messages": [
                {"role": "system", "content": "prefix"},
                *PARTS,
                {"role": "assistant", "content": "an earlier turn"},
                *PARTS,
            ],
        },
    ),
    "sglang": (
        CHAT,
        {
            "messages": MESSAGES,
            "max_completion_tokens": 5,
            "stream": True,
            "temperature": 0.0,
            "ignore_eos": True,
        },
    ),
    "litellm": (
        CHAT,
        {
            "messages": MESSAGES,
            "max_tokens": 5,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
async def test_benchmarks_get_what_they_read(server: Server, name: str) -> None:
    path, body = BENCHMARKS[name]
    headers = {"x-request-id": "bench-0a1b2c3d-0", "authorization": "Bearer none"}
    reply = await server.post(path, {"model": "tiny"} | body, headers=headers)
    assert reply.headers["x-request-id"] == "bench-0a1b2c3d-0"
    events = events_of(reply)
    assert events.text() == "Hello"
    assert events.finish() == "length"
    assert server.engine.opened[0].sampling.max_tokens == 5
    if "stream_options" in body:
        last = events.chunks[-1]
        assert last["choices"] == []  # where both tools look for the counts
        assert last["usage"]["completion_tokens"] == 5
        assert last["usage"]["prompt_tokens"] == len(server.engine.opened[0].prompt)
    continuous = body.get("stream_options", {}).get("continuous_usage_stats", False)
    assert all(("usage" in chunk) == continuous for chunk in events.chunks[:-1] if chunk["choices"])


@pytest.mark.parametrize("text", [TEXT, "x"], ids=["some", "one token"])
@pytest.mark.parametrize("name", ["vllm openai", "vllm openai-chat"])
async def test_vllms_loop_counts_tokens(listen: Make, name: str, text: str) -> None:
    """Its rules, line by line: what is a chunk with a choice is a token, and one must come."""
    path, body = BENCHMARKS[name]
    async with (
        listen(text) as server,
        httpx.AsyncClient(base_url=server.url.removesuffix("/v1")) as client,
    ):
        said, timed, output = "", 0, None
        async with client.stream("POST", path, json={"model": "tiny"} | body) as reply:
            assert reply.status_code == 200
            left = ""
            async for piece in reply.aiter_text():
                *messages, left = (left + piece).split("\n\n")
                for message in messages:
                    data = message.strip().removeprefix("data: ")
                    if not data or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if choices := event.get("choices"):
                        timed += 1
                        part = choices[0]
                        said += part.get("text") or part.get("delta", {}).get("content") or ""
                    elif usage := event.get("usage"):
                        output = usage["completion_tokens"]
        assert said == (text * 5)[:5]
        assert timed >= 1
        assert output == 5


async def test_what_benchmarks_ask_before_they_start(server: Server) -> None:
    models = (await server.client.get("/v1/models")).json()["data"]
    assert (models[0]["id"], models[0]["root"]) == ("tiny", "tiny")
    assert abs(models[0]["created"] - time.time()) < 60
    assert (await server.client.get("/health")).status_code == 200
    asked = {"model": "tiny", "prompt": "abc", "add_special_tokens": False}
    tokens = (await server.post("/tokenize", asked)).json()["tokens"]
    again = await server.post("/detokenize", {"model": "tiny", "tokens": tokens})
    assert again.json()["prompt"] == "abc"
    assert (await server.client.get("/metrics")).status_code == 200


async def test_litellm_reads_errors_by_their_words(server: Server) -> None:
    long = await server.chat(messages=[{"role": "user", "content": "x" * 5000}])
    error = long.json()["error"]
    assert (long.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in error["message"]
    nobody = await server.chat(model="hosted_vllm/tiny")
    assert nobody.status_code == 404
    assert nobody.json()["error"]["code"] == "model_not_found"
    health = await server.chat(max_tokens=1)  # how its health checks ask
    assert health.json()["usage"]["completion_tokens"] == 1


async def test_litellm_sends_tool_choice_and_tools(listen: Make) -> None:
    async with listen(SAID, template=QWEN) as server:
        body = (await server.chat(tools=[TOOL], tool_choice="auto", stream=False)).json()
        calls = body["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS] * 2
