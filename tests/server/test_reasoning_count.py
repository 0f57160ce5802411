"""Tokens of reasoning: counted the same streamed and whole, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from moestro.server.reasoning import THINK
from moestro.server.reasoning_count import HarmonyReasoning, MarkedReasoning
from tests.fakes import EOS, byte_tokenizer, spelled
from tests.server.conftest import Make

TEMPLATE = (
    "{%- for m in messages %}{{- m.content }}{%- endfor %}{%- if open %}<think>\n{%- endif %}"
)
THINKING = TEMPLATE + "{#- <think></think> #}"


def count(text: str, *, opened: bool = False, size: int = 1) -> int:
    counter = MarkedReasoning(THINK, lambda token: bytes([token]), opened=opened)
    data = list(text.encode())
    for i in range(0, len(data), size):
        counter.push(data[i : i + size])
    return counter.count


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_from_behind_the_first_marker_to_the_end_of_the_last(size: int) -> None:
    assert count("<think>Hm</think>yes", size=size) == len("Hm</think>")
    assert count("\n<think>Hm", size=size) == len("Hm")
    assert count("Hm</think>yes</think>", opened=True, size=size) == len("Hm</think>")
    for plain in ("", "yes", "<thin", "a<think>b</think>"):
        assert count(plain, size=size) == 0


def test_markers_that_are_one_token() -> None:
    words = {1: b"<think>", 2: b"</think>", 3: b"a</think>b"}
    counter = MarkedReasoning(THINK, lambda token: words.get(token, b"x"), opened=False)
    counter.push([1, 5, 5, 2, 5, 5])
    assert counter.count == 3
    counter = MarkedReasoning(THINK, lambda token: words.get(token, b"x"), opened=True)
    counter.push([5, 3, 5])
    assert counter.count == 2


def test_harmony_counts_its_analysis_channel() -> None:
    words = {1: b"<|channel|>", 2: b"<|message|>", 3: b"<|end|>", 4: b"<|start|>"}
    words |= {5: b"anal", 6: b"ysis", 7: b"final", 8: b"assistant", 9: b"x"}
    counter = HarmonyReasoning(words.__getitem__)
    counter.push([1, 5, 6, 2, 9, 9, 3, 4, 8, 1, 5, 6, 2, 9, 3, 4, 8, 1, 7, 2, 9, 9])
    assert counter.count == 3 + 2


@pytest.mark.parametrize("per_step", [1, 4, 1000])
async def test_usage_says_it(make: Make, per_step: int) -> None:
    said = "<think>Hm.</think>\n\nyes"
    async with make(said, template=THINKING, engine={"per_step": per_step}) as server:

        async def usages(**fields: Any) -> set[tuple[int, int]]:
            options = {"include_usage": True}
            found = (await server.chat(**fields)).json()["usage"]
            streamed = (await server.chat_events(stream_options=options, **fields)).usage
            assert streamed == found
            return {
                (u["completion_tokens_details"]["reasoning_tokens"], u["completion_tokens"])
                for u in (found, streamed)
            }

        inside, whole = len("Hm.</think>"), len(said) + 1
        assert await usages() == {(inside, whole)}
        assert await usages(n=2) == {(2 * inside, 2 * whole)}
        assert await usages(include_reasoning=False) == {(inside, whole)}
        assert await usages(separate_reasoning=False) == {(0, whole)}
        assert await usages(max_tokens=9) == {(2, 9)}
        cut = await server.chat(stop="m.")
        assert cut.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    async with make("Hm.</think>yes", template=THINKING) as server:
        usage = (await server.chat(chat_template_kwargs={"open": True})).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": inside}
        plain = (await server.complete()).json()["usage"]
        assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_usage_of_harmony(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Tokenizer = byte_tokenizer()
    words = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in words])
    channel, message, end, start = map(backend.token_to_id, words)
    said = [channel, *spelled("analysis"), message, *spelled("Hm"), end]
    said += [
        start,
        *spelled("assistant"),
        channel,
        *spelled("final"),
        message,
        *spelled("yes"),
        EOS,
    ]
    monkeypatch.setattr("tests.server.conftest.byte_tokenizer", lambda *_a, **_k: backend)
    template = TEMPLATE + "{#- <|channel|><|message|> #}"
    async with make(said, template=template, engine={"per_step": 3}) as server:
        body = (await server.chat()).json()
        assert body["choices"][0]["message"]["content"] == "yes"
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
