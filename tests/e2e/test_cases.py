"""Public bug cases 42, 43 and 46 through a whole server: pools that are too small, long prompts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.story import Story
from tests.oracle import tiny, wire
from tests.oracle.answers import differences, run
from tests.oracle.serving import Served, serve

BLOCK = 4
POOL = 104  # tokens: one and a half of the requests below
OUTPUT = 60


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("small")
    model = tiny.make(folder / "model", tiny.Spec("qwen3_moe", 12, context=4096))
    flags = ("--kv-cache-tokens", str(POOL), "--block-size", str(BLOCK))
    with serve(model, *flags, log=folder / "log") as served:
        yield served


HOT = {"temperature": 0.9, "seed": 5}
EDITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition penalty": {"repetition_penalty": 1.2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "seeded": HOT,
    "seeded and filtered": HOT | {"top_p": 0.8, "top_k": 40, "logprobs": 3},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True, "logprobs": 1},
    "min_tokens": HOT | {"min_tokens": 50, "stop_token_ids": list(range(20, 60))},
}
BASE = {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize("name", EDITS)
async def test_case_43_giving_way_changes_nothing(small: Served, name: str) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    bodies = {
        str(number): {"prompt": [30 + number, 70, 90 + number]} | BASE | EDITS[name] | way
        for number, way in enumerate(({}, streamed, streamed))
    }
    alone = {}
    for number, body in bodies.items():
        alone |= await run(small.port, {number: body})
    before = small.stats()["scheduler"]["preemptions"]
    together = await run(small.port, bodies)
    assert differences(together, alone) == {}
    assert all(len(answer.choices[0].ids) >= 50 for answer in together.values())
    await asyncio.to_thread(small.wait_idle)
    assert small.stats()["scheduler"]["preemptions"] > before


async def test_case_43_a_stop_string_survives_giving_way(small: Served) -> None:
    body = BASE | {"prompt": [31, 71, 91]}
    text = (await run(small.port, {"all": body}))["all"].choices[0].text
    stop = text[len(text) // 2 :][:6]
    wanted = text[: text.index(stop)]
    stopped = {str(n): body | {"stop": [stop], "stream": n > 0} for n in range(3)}
    for answer in (await run(small.port, stopped)).values():
        assert (answer.failure, answer.choices[0].text) == (None, wanted)
        assert answer.choices[0].finish == "stop"


@pytest.mark.parametrize(
    ("length", "stream"), [(POOL - 1, True), (POOL, False), (POOL + 1, True), (4000, False)]
)
async def test_case_42_what_never_fits_is_refused_and_blocks_nobody(
    small: Served, length: int, stream: bool
) -> None:
    body = {"prompt": [50] * length, "max_tokens": 5, "temperature": 0, "stream": stream}
    reply = await wire.ask(small.port, "/v1/completions", body)
    if length < POOL:
        assert reply.status == 200
    else:
        assert reply.status == 400
        error = (await reply.json())["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(POOL) in error["message"]
    await reply.leave()
    after = (await run(small.port, {"after": BASE | {"prompt": [40]}}))["after"]
    assert (after.failure, len(after.choices[0].ids)) == (None, OUTPUT)


async def test_case_42_what_outgrows_the_pool_ends_with_length(small: Served) -> None:
    body = BASE | {"prompt": [50, 51], "max_tokens": 1000, "stream": True}
    others = {str(n): BASE | {"prompt": [60 + n]} for n in range(2)}
    answers = await run(small.port, {"long": body} | others)
    assert answers["long"].choices[0].finish == "length"
    assert len(answers["long"].choices[0].ids) > POOL - BLOCK
    assert [answers[n].failure for n in others] == [None, None]
    await asyncio.to_thread(small.wait_idle)


async def test_case_46_a_long_prompt_does_not_stop_a_stream(scripted: Served, story: Story) -> None:
    endless = {"max_tokens": 8000, "ignore_eos": True, "stream": True}
    stream = await wire.ask(
        scripted.port, "/v1/completions", story.completion("alphabet", **endless)
    )
    times: list[float] = []

    async def read() -> None:
        async for _ in stream.events():
            times.append(time.monotonic())  # noqa: PERF401 - seen while they come

    reading = asyncio.create_task(read())
    while len(times) < 20:
        await asyncio.sleep(0.01)
    started = time.monotonic()
    body = story.completion("letters", length=7000, max_tokens=1)
    reply = await wire.ask(scripted.port, "/v1/completions", body)
    assert reply.status == 200
    await reply.body()
    ended = time.monotonic()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.leave()
    await reply.leave()
    meanwhile = [at for at in times if started <= at <= ended]
    gaps = [b - a for a, b in itertools.pairwise(meanwhile)]
    assert ended - started > 0.3  # the prompt is long
    assert len(meanwhile) > 10
    assert max(gaps) < (ended - started) / 3
