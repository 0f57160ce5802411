"""Public bug cases A (1-8): stop strings, and the log-probabilities beside them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.server.choice import ChoiceText
from moestro.server.detokenize import ByteDetokenizer, byte_table
from moestro.server.sampling import StopRules
from moestro.server.stops import StopMatcher
from moestro.types import Finish, Request, TokenEvent
from tests.fakes import EOS, FIRST_BYTE, byte_tokenizer, info, spelled
from tests.server.conftest import Make
from tests.server.sse import parse

TABLE = byte_table(byte_tokenizer())
SPLIT = (b"ABC", b"DEF", b"G", b"HI", b"J", b"tail")


def pieces(*parts: bytes) -> dict[str, Any]:
    """Server options in which each part is one token, and the tokens that say them in order."""
    distinct = list(dict.fromkeys(part for part in parts if len(part) > 1))
    backend = byte_tokenizer(distinct)
    table = byte_table(backend)
    assert table is not None
    ids = [table.visible.index(part) for part in parts]
    return {"said": ids, "pieces": distinct}


@pytest.mark.parametrize("per_step", [1, 3, 50])
async def test_case_01_no_prefix_of_a_stop_string_leaves(make: Make, per_step: int) -> None:
    async with make(**pieces(*SPLIT), engine={"per_step": per_step}) as server:
        for ask, whole in (
            (server.complete_events, server.complete),
            (server.chat_events, server.chat),
        ):
            events = await ask(stop=["DEFGHIJ"], max_tokens=50)
            assert events.text() == "ABC"
            assert events.finish() == "stop"
            body = (await whole(stop=["DEFGHIJ"], max_tokens=50)).json()["choices"][0]
            text = body["text"] if "text" in body else body["message"]["content"]
            assert (text, body["finish_reason"], body["stop_reason"]) == ("ABC", "stop", "DEFGHIJ")


async def test_case_01_a_false_start_is_given_out_after_all(make: Make) -> None:
    async with make(**pieces(*SPLIT)) as server:
        events = await server.complete_events(stop=["DEFGHIX"], max_tokens=50)
        assert events.text() == "ABCDEFGHIJtail"
        texts = [choice["text"] for choice in events.of(0)]
        assert texts[:2] == ["ABC", "DEFGHIJ"]


async def test_case_01_the_engine_is_told_to_end(make: Make) -> None:
    async with make(**pieces(*SPLIT)) as server:
        body = (await server.complete(stop="DEF", max_tokens=500, ignore_eos=True)).json()
        assert body["choices"][0]["text"] == "ABC"
        assert body["usage"]["completion_tokens"] == 2
        await server.idle()
        assert server.engine.aborted == [server.engine.opened[0].id]


async def test_case_01_the_other_choices_go_on(make: Make) -> None:
    def script(request: Request) -> list[int]:
        return spelled("a|b|c" if request.id.endswith("-0") else "abcabc")

    async with make(script, engine={"manual": True}) as server:
        task = asyncio.create_task(server.complete(n=2, stop="|", max_tokens=6))
        while not server.engine.opened:
            await asyncio.sleep(0.005)
        for _ in range(3):
            server.engine.step()
            await asyncio.sleep(0.01)
        first, second = (request.id for request in server.engine.opened)
        assert server.engine.aborted == [first]
        assert server.engine.open_ids == [second]
        for _ in range(3):
            server.engine.step()
        body = (await task).json()
        assert [choice["text"] for choice in body["choices"]] == ["a", "abcabc"]
        assert body["usage"]["completion_tokens"] == 2 + 6


@pytest.mark.parametrize("stream", [False, True])
async def test_case_01_what_was_said_past_a_stop_is_dropped(make: Make, stream: bool) -> None:
    async with make("ab|cdef", engine={"manual": True}) as server:
        task = asyncio.create_task(server.complete(stop="|", max_tokens=50, stream=stream))
        while not server.engine.opened:
            await asyncio.sleep(0.005)
        for _ in range(6):  # all of it before the server looks once
            server.engine.step()
        response = await task
        if stream:
            assert parse(response.content).text() == "ab"
        else:
            assert response.json()["choices"][0]["text"] == "ab"
            assert response.json()["usage"]["completion_tokens"] == 3


async def test_case_02_a_turn_marker_in_plain_pieces_is_swallowed(make: Make) -> None:
    async with make(**pieces(b"ok", b"<|", b"im_end", b"|>", b"more")) as server:
        events = await server.chat_events(stop=["<|im_end|>"])
        assert events.text() == "ok"
        assert events.finish() == "stop"


async def test_case_03_stops_are_text_not_tokens(make: Make) -> None:
    async with make(b"a\n\nb") as server:
        body = (await server.complete(stop=["\n\n"])).json()
        assert body["choices"][0]["text"] == "a"


async def test_case_04_more_tokens_than_the_tokenizer_would_use(make: Make) -> None:
    async with make("before<END>after", pieces=(b"<END>",)) as server:
        events = await server.complete_events(stop=["<END>"], max_tokens=40)
        assert events.text() == "before"


async def test_case_06_only_a_real_prefix_is_held_back(make: Make) -> None:
    long = "x" * 29 + "!"
    async with make("think</think>done") as server:
        events = await server.chat_events(stop=[long], logprobs=True, top_logprobs=1)
        deltas = [c["delta"]["content"] for c in events.of(0) if "content" in c["delta"]][1:]
        assert deltas == list("think</think>done")


@pytest.mark.parametrize("per_step", [1, 4])
async def test_case_06_logprobs_describe_exactly_the_text_beside_them(
    make: Make, per_step: int
) -> None:
    said = pieces(b"one ", b"tw", b"o E", b"N", b"Q ", b"E", b"ND", b"rest")
    async with make(**said, engine={"per_step": per_step}) as server:
        events = await server.chat_events(stop=["END"], logprobs=True, return_token_ids=True)
        assert events.text() == "one two ENQ "
        seen = ""
        for choice in events.of(0)[1:]:
            entries = (choice["logprobs"] or {"content": []})["content"]
            text = "".join(bytes(entry["bytes"]).decode() for entry in entries)
            delta = choice["delta"].get("content", "")
            seen += delta
            assert text == delta + ("END" if seen == "one two ENQ " and "END" in text else "")


OUTCOMES: dict[str, tuple[dict[str, Any], str, int, list[str]]] = {
    # fields, finish, completion tokens, texts of the logprob entries
    "eos": ({}, "stop", 7, ["ABC", "DEF", "G", "HI", "J", "tail"]),
    "stop token": (
        {"stop_token_ids": [FIRST_BYTE + ord("J")]},
        "stop",
        5,
        ["ABC", "DEF", "G", "HI"],
    ),
    "inside one token": ({"stop": "E"}, "stop", 2, ["ABC", "DEF"]),
    "over three tokens": ({"stop": "FGH"}, "stop", 4, ["ABC", "DEF", "G", "HI"]),
    "length": ({"max_tokens": 3}, "length", 3, ["ABC", "DEF", "G"]),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_case_07_one_entry_per_counted_token_but_the_swallowed_end(
    make: Make, outcome: str
) -> None:
    fields, finish, count, entries = OUTCOMES[outcome]
    fields = {"max_tokens": 50, **fields, "logprobs": True, "return_token_ids": True}
    async with make(**pieces(*SPLIT)) as server:
        body = (await server.chat(**fields)).json()
        choice = body["choices"][0]
        assert choice["finish_reason"] == finish
        assert body["usage"]["completion_tokens"] == count
        assert len(choice["token_ids"]) == count
        assert [e["token"] for e in choice["logprobs"]["content"]] == entries
        events = await server.chat_events(**fields)
        streamed = [c["logprobs"]["content"] for c in events.of(0) if c["logprobs"]]
        assert [e["token"] for part in streamed for e in part] == entries
        ids = [token for c in events.of(0) for token in c.get("token_ids", ())]
        assert ids == choice["token_ids"]
        assert events.text() == choice["message"]["content"]


async def test_case_07_a_second_eos_is_swallowed_too(make: Make) -> None:
    setup = pieces(*SPLIT)
    ends = info(eos_token_ids=(EOS, setup["said"][2]))
    async with make(**setup, engine={"limits": ends}) as server:
        body = (await server.chat(logprobs=True)).json()
        assert body["choices"][0]["message"]["content"] == "ABCDEF"
        assert body["choices"][0]["stop_reason"] is None
        assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_case_08_an_empty_stop_string_is_refused(make: Make, path: str, stop: Any) -> None:
    async with make("abc") as server:
        response = await getattr(server, path)(stop=stop)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stop"


@pytest.mark.parametrize("stop", [None, []])
async def test_case_08_no_stop_is_no_stop(make: Make, stop: Any) -> None:
    async with make("abc") as server:
        assert (await server.complete(stop=stop)).json()["choices"][0]["text"] == "abc"


async def test_too_many_and_too_long_stops_are_refused(make: Make) -> None:
    async with make("abc") as server:
        for stop in (["a"] * 17, ["x" * 4097], [1], {"a": 1}):
            response = await server.complete(stop=stop)
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith("stop")


async def test_the_stop_string_can_be_shown(make: Make) -> None:
    async with make(**pieces(*SPLIT)) as server:
        fields = {"stop": ["EFG"], "include_stop_str_in_output": True, "logprobs": 0}
        body = (await server.complete(**fields)).json()
        assert body["choices"][0]["text"] == "ABCDEFG"
        assert (await server.complete_events(**fields)).text() == "ABCDEFG"


async def test_a_stop_token_can_be_shown(make: Make) -> None:
    async with make("abc") as server:
        fields = {"stop_token_ids": [4 + ord("b")], "include_stop_str_in_output": True}
        choice = (await server.complete(**fields)).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("ab", 4 + ord("b"))


async def test_min_tokens_delays_stop_strings(make: Make) -> None:
    async with make("ab-ab-ab-") as server:
        for least, text in ((0, ""), (1, ""), (2, ""), (3, "ab-"), (6, "ab-ab-"), (9, "ab-ab-ab-")):
            body = (await server.complete(stop="ab", min_tokens=least, max_tokens=9)).json()
            assert body["choices"][0]["text"] == text, least


async def test_overlapping_stops_end_at_the_earliest_then_in_order(make: Make) -> None:
    async with make("xabcd") as server:
        for stop, text in (
            (["cd", "bc"], "xa"),
            (["bc", "abc"], "xa"),
            (["abc", "bc"], "x"),
            (["abcd", "b"], "xa"),
        ):
            body = (await server.complete(stop=stop)).json()
            assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == (
                text,
                stop[0] if text == "x" or stop[0] == "bc" else stop[1],
            )


def reference(text: str, stops: Sequence[str]) -> str:
    """What is left of `text`: cut at the stop string that ends first, ties in order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4, unique=True),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    detailed=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_cutting_gives_the_reference_text(
    text: str, stops: list[str], cuts: list[int], detailed: bool
) -> None:
    assert TABLE is not None
    choice = ChoiceText(ByteDetokenizer(TABLE.plain, 0), StopRules(tuple(stops)), detailed=detailed)
    tokens = [4 + byte for byte in text.encode()]
    borders = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    given_out = ""
    want = reference(text, stops)
    for start, end in itertools.pairwise(borders):
        last = end == len(tokens)
        finish = Finish.LENGTH if last else None
        stopped = choice.push(TokenEvent("x", tuple(tokens[start:end]), finish=finish))
        given_out += choice.take().text
        assert want.startswith(given_out)
        if stopped or last:
            break
    assert given_out == want


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=6)))
@settings(max_examples=200, deadline=None)
def test_what_is_held_is_the_longest_prefix_of_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for char in text:
        matcher.feed(char, armed=False)
    longest = max(
        (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
    )
    assert matcher.held == longest


def test_a_long_stop_string_costs_no_more_than_its_length() -> None:
    matcher = StopMatcher(["a" * 4095 + "b"])
    assert matcher.feed("a" * 100_000) is None
    match = matcher.feed("b")
    assert match is not None
    assert match.end == 100_001
