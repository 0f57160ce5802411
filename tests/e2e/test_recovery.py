"""The engine process is killed in the middle of streams, and no client can tell."""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.oracle import tiny, wire
from tests.oracle.answers import Answers, Bodies, Disturb, differences
from tests.oracle.answers import run as run_all
from tests.oracle.serving import Served, is_idle, serve

PATIENCE = 60.0
TOKENS = 200
LONG = {
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 2,
    "return_token_ids": True,
}
HOT = {"temperature": 0.9, "seed": 7}
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": LONG | {"temperature": 0},
    "seeded": LONG | HOT,
    "filtered": LONG | HOT | {"top_k": 20, "top_p": 0.8, "logit_bias": {"70": 3}},
    "penalties": LONG | HOT | PENALTIES,
    "greedy penalties": LONG | PENALTIES | {"temperature": 0},
    "several": LONG | HOT | {"n": 3},
    "ends by itself": LONG | HOT | {"min_tokens": 120, "stop_token_ids": list(range(100, 140))},
    "echo": LONG | HOT | {"echo": True},
    "whole": LONG | HOT | {"stream": False, "n": 2},
    "usage": {k: v for k, v in LONG.items() if k != "logprobs"}
    | HOT
    | {"stream_options": {"include_usage": True}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("recovery")
    model = tiny.make(folder / "model", tiny.Spec("qwen3_moe", 12, context=4096))
    with serve(model, "--engine-restarts", "100", log=folder / "log") as served:
        yield served


@pytest.fixture(scope="module")
def bodies(server: Served) -> Bodies:
    """All requests; the stop strings are ones that come."""
    text = asyncio.run(run(server, {"greedy": BODIES["greedy"]}))["greedy"].choices[0].text
    stop = {"stop": [text[140:145]]}
    return BODIES | {"stop string": BODIES["greedy"] | stop | {"prompt": prompt_of(0)}}


@pytest.fixture(scope="module")
def undisturbed(server: Served, bodies: Bodies) -> Answers:
    answers = asyncio.run(run(server, bodies))
    assert answers["stop string"].choices[0].finish == "stop"
    assert answers["ends by itself"].choices[0].finish == "stop"
    assert len(answers["greedy"].choices[0].ids) == TOKENS
    return answers


def prompt_of(number: int) -> list[int]:
    return [10 + (3 * number + k) % 200 for k in range(5 + number)]


async def run(server: Served, bodies: Bodies, disturb: Disturb | None = None) -> Answers:
    """All requests beside each other, each with a prompt of its own."""
    prompts = ({"prompt": prompt_of(number)} for number in range(len(bodies)))
    asked = dict(zip(bodies, map(operator.or_, prompts, bodies.values()), strict=True))
    return await run_all(server.port, asked, disturb, patience=PATIENCE)


def same(found: Answers, wanted: Answers) -> None:
    assert differences(found, wanted) == {}


async def engine(server: Served, after: psutil.Process | None = None) -> psutil.Process:
    """The engine's process, once there is one that is not `after`."""
    async with asyncio.timeout(PATIENCE):
        while True:
            children = psutil.Process(server.process.pid).children()
            found = [c for c in children if c != after and c.status() != psutil.STATUS_ZOMBIE]
            if found:
                return found[0]
            await asyncio.sleep(0.01)


async def grown(answers: Answers, by: int) -> None:
    """Until every stream has got this many characters more, or has ended."""
    before = {name: answer.length for name, answer in answers.items()}
    while not all(
        answer.done or answer.length >= before[name] + by or name == "whole"
        for name, answer in answers.items()
    ):
        await asyncio.sleep(0.005)


async def health(server: Served) -> dict[str, Any]:
    _, body = await wire.get(server.port, "/health")
    return dict(json.loads(body))


async def test_killed_in_the_middle(server: Served, bodies: Bodies, undisturbed: Answers) -> None:
    async def kill(answers: Answers) -> None:
        await grown(answers, 30)
        (await engine(server)).kill()

    same(await run(server, bodies, kill), undisturbed)
    await asyncio.to_thread(server.wait, is_idle, "idle")
    _, text = await wire.get(server.port, "/metrics")
    assert b"engine_restarts_total{" in text


async def test_killed_twice(server: Served, bodies: Bodies, undisturbed: Answers) -> None:
    async def kill(answers: Answers) -> None:
        await grown(answers, 30)
        first = await engine(server)
        first.kill()
        second = await engine(server, first)
        await grown(answers, 20)
        second.kill()

    same(await run(server, bodies, kill), undisturbed)
    await asyncio.to_thread(server.wait, is_idle, "idle")


async def test_killed_and_killed_again_while_loading(
    server: Served, bodies: Bodies, undisturbed: Answers
) -> None:
    async def kill(answers: Answers) -> None:
        await grown(answers, 30)
        first = await engine(server)
        first.kill()
        second = await engine(server, first)
        said = await health(server)
        assert said["status"] == "restarting"
        assert {"stage", "done", "total", "progress"} <= said.keys()
        second.kill()

    same(await run(server, bodies, kill), undisturbed)
    await asyncio.to_thread(server.wait, is_idle, "idle")
    assert (await health(server))["status"] == "ok"


async def test_clients_that_leave_during_a_restart(server: Served, bodies: Bodies) -> None:
    replies = []
    for number in range(3):
        body = {"prompt": prompt_of(number)} | BODIES["several"] | {"max_tokens": 3000}
        replies.append(await wire.ask(server.port, "/v1/completions", body))
    dead = await engine(server)
    dead.kill()
    await engine(server, dead)
    for number, reply in enumerate(replies):
        await reply.leave(reset=number == 1)
    short = {"late": BODIES["greedy"] | {"max_tokens": 20}}  # taken while there is no engine
    assert len((await run(server, short))["late"].choices[0].ids) == 20
    await asyncio.to_thread(server.wait, is_idle, "idle")
    assert server.stats()["scheduler"]["prompt_tokens"] == len(prompt_of(0))
