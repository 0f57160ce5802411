"""Public bug cases H: defects read in the source of other servers, each by its letter there.

Letters a, l, m, n and o are in `test_clients`, `test_chat` and `test_edge`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from moestro.server.app import ROUTES
from moestro.server.settings import serve_options
from tests.server.asking import refused, sampled
from tests.server.conftest import Make, Server

POSTS = [path for path, (_, methods, model) in ROUTES.items() if methods == ("POST",) and model]
OPENAI = [path for path in POSTS if not path.startswith("/v1/messages")]


async def test_bug_b_every_field_reaches_the_engine(make: Make) -> None:
    async with make("x") as server:
        params = await sampled(
            server,
            max_tokens=7,
            n=1,
            seed=11,
            temperature=0.7,
            top_p=0.5,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.3,
            logprobs=2,
            echo=True,
            logit_bias={"5": 3},
        )
        assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.7, 0.5)
        assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
        assert (params.repetition_penalty, params.logit_bias) == (1.3, {5: 3.0})
        assert (params.logprobs, params.prompt_logprobs) == (2, 2)
        assert params.seed == (await sampled(server, seed=11)).seed
        before = len(server.engine.opened)
        body = (await server.complete(n=3, echo=True, stop=["x"])).json()
        assert len(server.engine.opened) == before + 3
        assert [choice["text"] for choice in body["choices"]] == ["hi"] * 3


@pytest.mark.parametrize("chat", [False, True])
async def test_bug_c_the_limit_is_told_from_the_end(make: Make, chat: bool) -> None:
    async with make("abc") as server:
        ask = server.chat if chat else server.complete
        for tokens, reason in ((2, "length"), (3, "length"), (4, "stop")):
            body = (await ask(max_tokens=tokens)).json()
            assert body["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(("chat", "prefix"), [(False, "cmpl-"), (True, "chatcmpl-")])
async def test_bugs_d_and_e_times_ids_and_names(make: Make, chat: bool, prefix: str) -> None:
    async with make("abc") as server:
        ask = server.chat if chat else server.complete
        bodies = [(await ask(model="org/tiny")).json() for _ in range(2)]
        for body in bodies:
            assert isinstance(body["created"], int)
            assert abs(body["created"] - time.time()) < 60
            assert body["id"].startswith(prefix)
            assert body["model"] == "org/tiny"
        assert bodies[0]["id"] != bodies[1]["id"]
        wrong = await ask(model="org/tinny")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")


async def test_bug_f_prompts_of_token_ids_work(make: Make) -> None:
    async with make("abc") as server:
        assert (await server.complete(prompt=[5, 6, 7])).json()["choices"][0]["text"] == "abc"
        assert server.engine.opened[-1].prompt == (5, 6, 7)


async def test_bug_g_others_are_answered_while_one_generates(listen: Make) -> None:
    async with listen("abc", engine={"manual": True}) as server:
        asked = asyncio.create_task(server.complete(max_tokens=2))
        while not server.engine.open_ids:
            await asyncio.sleep(0.005)
        for path in ("/health", "/v1/models", "/metrics", "/version"):
            assert (await asyncio.wait_for(server.client.get(path), 2)).status_code == 200
        second = asyncio.create_task(server.complete(max_tokens=1))
        while len(server.engine.open_ids) < 2:
            await asyncio.sleep(0.005)
        server.engine.step()
        assert (await second).status_code == 200
        assert not asked.done()
        server.engine.step()
        assert (await asked).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_bug_h_an_error_wedges_nothing(make: Make, stream: bool) -> None:
    async with make("abc", engine={"seats": 1}) as server:
        for _ in range(5):
            server.engine.fail_next = "the step failed"
            failed = await server.chat(stream=stream)
            assert failed.status_code == (200 if stream else 500)
            assert "the step failed" in failed.text
            await server.idle()
        answer = await asyncio.wait_for(server.chat(), 2)
        assert answer.json()["choices"][0]["message"]["content"] == "abc"


async def test_bug_j_what_typed_clients_send_is_no_422(make: Make) -> None:
    parts = [{"type": "text", "text": "hi"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    async with make("abc") as server:
        assert (await server.chat(messages=history)).status_code == 200
        for wrong in ([{"role": "user", "content": 5}], "hi", [["user", "hi"]], [None]):
            error = await refused(server, "chat", messages=wrong)
            assert error["param"].startswith("messages")
            assert error["message"]


async def test_bug_k_clients_find_the_models(make: Make) -> None:
    async with make("abc") as server:
        listed = (await server.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny"]


CONSTRAINTS: dict[str, Any] = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
}


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_bug_p_a_constraint_is_never_dropped(make: Make, name: str, path: str) -> None:
    async with make("abc") as server:
        assert (await sampled(server, path)).grammar is None
        assert (await sampled(server, path, **{name: CONSTRAINTS[name]})).grammar is not None
        error = await refused(server, path, **{name: 5})
        assert error["param"] == name
        error = await refused(server, path, guided_whatever="x")
        assert error["param"] == "guided_whatever"


@pytest.mark.parametrize("path", OPENAI)
async def test_bug_q_errors_have_one_shape_on_every_route(make: Make, path: str) -> None:
    async with make("abc") as server:
        for sent in ({}, {"model": 5}, {"model": "nope"}, {"messages": 5}, {"prompt": {}}):
            answer = await server.post(path, sent)
            assert answer.status_code in (400, 404)
            wanted(answer)
        wanted(await server.client.post(path, content=b"{"))
        wanted(await server.client.get(path))
        wanted(await server.client.post(path + "/nothing", json={}))


def wanted(answer: httpx.Response) -> None:
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_bug_r_zero_is_not_unset(make: Make, name: str) -> None:
    async with make("abc") as server:
        assert (await refused(server, "chat", **{name: 0}))["param"] == name
        both = {"max_tokens": 5, "max_completion_tokens": 0}
        assert (await refused(server, "chat", **both))["param"] == "max_completion_tokens"
        other = {"max_tokens": 0, "max_completion_tokens": 5}
        assert (await refused(server, "chat", **other))["param"] == "max_tokens"


async def test_bug_s_idle_connections_outlive_the_clients_pool(listen: Make) -> None:
    assert serve_options()["timeout_keep_alive"] >= 65
    async with listen("x") as server:
        first = await server.complete()
        assert first.headers.get("connection") != "close"
        stream = first.extensions["network_stream"]
        second = await server.complete()
        assert second.extensions["network_stream"] is stream  # the same connection
        server.app.state.lifecycle.begin_drain()
        assert (await server.client.get("/health")).headers["connection"] == "close"
        server.app.state.lifecycle.draining = False


async def test_bug_t_a_chat_is_what_was_asked_for(make: Make) -> None:
    async with make("abc" * 20) as server:
        whole = await answered(server, stream=False)
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"]["content"] == "abc" * 20  # more than 16 tokens
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == 61
        events = await server.chat_events(stop="b")
        assert {chunk["object"] for chunk in events.chunks} == {"chat.completion.chunk"}
        assert {chunk["model"] for chunk in events.chunks} == {"tiny"}
        assert all(abs(chunk["created"] - time.time()) < 60 for chunk in events.chunks)
        assert (events.text(), events.finish()) == ("a", "stop")
        two = await answered(server, n=2)
        assert [choice["index"] for choice in two["choices"]] == [0, 1]


async def answered(server: Server, **fields: Any) -> dict[str, Any]:
    response = await server.chat(**fields)
    assert response.status_code == 200
    return dict(response.json())
