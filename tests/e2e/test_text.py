"""Stop strings, cut characters and invalid bytes through the front door: streamed or not, with
log-probabilities or not, in a chat or not, the text is the same and is the right one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.story import CHAINS, Story
from tests.oracle import wire
from tests.oracle.serving import Served


@dataclass(frozen=True)
class Case:
    """A chain, how it is asked for, and what must come out."""

    chain: str
    text: str
    tokens: int  # completion tokens, the stop or EOS token included
    finish: str = "stop"
    stop_reason: str | bytes | None = None  # bytes: a piece, meaning its token id
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "eos": Case("letters", "ABCDEFGHIJ", 6),
    "length": Case("letters", "ABCDEF", 2, "length", options={"max_tokens": 2}),
    "stop over three tokens": Case(
        "letters", "ABC", 5, stop_reason="DEFGHIJ", options={"stop": ["DEFGHIJ"]}
    ),
    "stop inside a token": Case("letters", "A", 1, stop_reason="B", options={"stop": "B"}),
    "the first of two": Case(
        "letters", "ABCDE", 4, stop_reason="FGH", options={"stop": ["GHI", "FGH"]}
    ),
    "prefix of a stop that never comes": Case(
        "letters", "ABCDEFGHIJ", 6, options={"stop": ["HIJK", "JJ"]}
    ),
    "stop shown": Case(
        "letters", "ABCDEFG", 3, stop_reason="FG",
        options={"stop": "FG", "include_stop_str_in_output": True},
    ),
    "stop before min_tokens": Case(
        "letters", "ABCDEFG", 4, stop_reason="HI",
        options={"stop": ["CD", "HI"], "min_tokens": 3},
    ),
    "stop token": Case(
        "letters", "ABCDEF", 3, stop_reason=b"G", options={"stop_token_ids": [b"G"]}
    ),
    "two newlines": Case("lines", "a", 2, stop_reason="\n\n", options={"stop": ["\n\n"]}),
    "a marker in ordinary tokens": Case(
        "turn", "said ", 5, stop_reason="<|im_end|>", options={"stop": ["<|im_end|>"]}
    ),
    "a marker spelled by letters": Case(
        "tag", "ok ", 6, stop_reason="<END>", options={"stop": ["<END>"]}
    ),
    "a false start of the stop": Case(
        "overlap", "a", 2, stop_reason="aab", options={"stop": ["aab"]}
    ),
    "character over two tokens": Case("emoji", "x \U0001f600 y", 4),
    "limit inside a character": Case(
        "emoji", "x \ufffd", 1, "length", options={"max_tokens": 1}
    ),
    "stop after a cut character": Case(
        "emoji", "x ", 2, stop_reason="\U0001f600", options={"stop": ["\U0001f600"]}
    ),
    "nothing but a cut character": Case(
        "cut", "\ufffd", 1, "length", options={"max_tokens": 1}
    ),
    "never valid": Case("invalid", "\ufffd\ufffd\ufffd(", 5),
    "a real replacement character": Case("replacement", "before \ufffd behind", 3),
    "line separators and NUL": Case("separators", "one\u2028two\x85\x00three", 4),
    "no special token is shown": Case(
        "letters", "ABCDEFGHIJ", 8, "length", options={"max_tokens": 8, "ignore_eos": True}
    ),
}  # fmt: skip
DETAILS: dict[str, dict[str, dict[str, Any]]] = {
    "completions": {"plain": {}, "logprobs": {"logprobs": 1}},
    "chat/completions": {"plain": {}, "logprobs": {"logprobs": True, "top_logprobs": 1}},
}


async def whole(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to an ordinary request."""
    reply = await wire.ask(port, path, body)
    try:
        answer = await reply.json()
    finally:
        await reply.leave()
    assert reply.status == 200, answer
    return dict(answer)


async def streamed(port: int, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = await wire.ask(port, path, body | options)
    try:
        assert reply.status == 200, await reply.body()
        return [event async for event in reply.events()]
    finally:
        await reply.leave()


def text_of(choice: dict[str, Any]) -> str:
    """Text of a choice or of a delta, in either API."""
    inner = choice.get("delta", choice.get("message", choice))
    return str(inner.get("text", inner.get("content")) or "")


def logprobs_of(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """(token, log-probability) of a choice or of a delta, in either API."""
    found = choice.get("logprobs") or {}
    if "content" in found:
        return [(one["token"], one["logprob"]) for one in found["content"] or []]
    return list(zip(found.get("tokens", []), found.get("token_logprobs", []), strict=True))


@pytest.mark.parametrize("detail", ["plain", "logprobs"])
@pytest.mark.parametrize("api", DETAILS)
@pytest.mark.parametrize("name", CASES)
async def test_text(name: str, api: str, detail: str, scripted: Served, story: Story) -> None:
    case = CASES[name]
    make = story.chat if api.startswith("chat") else story.completion
    body = make(case.chain, **case.options, **DETAILS[api][detail])
    if "stop_token_ids" in body:
        body["stop_token_ids"] = [story.token(piece) for piece in body["stop_token_ids"]]
    answer, events = await asyncio.gather(
        whole(scripted.port, f"/v1/{api}", body), streamed(scripted.port, f"/v1/{api}", body)
    )
    (choice,) = answer["choices"]
    assert text_of(choice) == case.text
    assert choice["finish_reason"] == case.finish
    reason = case.stop_reason
    assert choice.get("stop_reason") == (story.token(reason) if type(reason) is bytes else reason)
    assert answer["usage"]["completion_tokens"] == case.tokens
    assert_same_stream(events, answer)


def assert_same_stream(events: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """The events of one choice add up to `answer`, and have the right shape."""
    *chunks, last = events
    assert last["choices"] == []
    # What was cached depends on which of the two came first.
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][c] for c in counts] == [answer["usage"][c] for c in counts]
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert "".join(map(text_of, deltas)) == text_of(answer["choices"][0])
    assert [d["finish_reason"] for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]
    want = logprobs_of(answer["choices"][0])
    found = [pair for delta in deltas for pair in logprobs_of(delta)]
    assert [token for token, _ in found] == [token for token, _ in want]
    assert [p for _, p in found] == pytest.approx([p for _, p in want], abs=1e-5)


async def test_raw_bytes_are_in_the_logprobs(scripted: Served, story: Story) -> None:
    for name in ("emoji", "invalid", "letters"):
        body = story.chat(name, logprobs=True)
        answer = await whole(scripted.port, "/v1/chat/completions", body)
        content = answer["choices"][0]["logprobs"]["content"]
        assert [bytes(one["bytes"]) for one in content] == list(CHAINS[name].pieces)


async def test_nothing_of_a_stop_string_is_ever_sent(scripted: Served, story: Story) -> None:
    body = story.completion("tag", stop=["<END>"])
    events = await streamed(scripted.port, "/v1/completions", body)
    assert not any("<" in text_of(c) for event in events for c in event["choices"])


async def test_texts_of_many_streams_do_not_mix(scripted: Served, story: Story) -> None:
    names = [name for name in CHAINS if name != "alphabet"] * 4
    lengths = range(40, 40 + 24)
    bodies = [story.completion(name) for name in names]
    bodies += [story.completion("alphabet", max_tokens=n, length=n) for n in lengths]
    wanted = [CHAINS[name].text for name in names] + [story.said("alphabet", n) for n in lengths]
    streams = await asyncio.gather(
        *(streamed(scripted.port, "/v1/completions", body) for body in bodies)
    )
    texts = ["".join(text_of(c) for event in s for c in event["choices"]) for s in streams]
    assert texts == wanted


async def test_a_slow_reader_gets_all_and_holds_nobody_up(scripted: Served, story: Story) -> None:
    tokens = 600  # with five alternatives each: far more than a socket's buffers begin with
    body = story.completion("alphabet", max_tokens=tokens, stream=True, logprobs=5)
    slow = await wire.ask(scripted.port, "/v1/completions", body, receive_buffer=4096)
    try:
        answer = await whole(scripted.port, "/v1/completions", story.completion("letters"))
        assert text_of(answer["choices"][0]) == CHAINS["letters"].text
        # The engine does not wait for the reader: it ends the sequence while nobody reads.
        scripted.wait_idle()
        text = "".join([text_of(c) async for event in slow.events() for c in event["choices"]])
        assert text == story.said("alphabet", tokens)
    finally:
        await slow.leave()
