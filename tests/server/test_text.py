"""Public bug cases B (10-15): characters cut between tokens, bytes that are no text, bodies."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from moestro.errors import ModelError
from moestro.server.detokenize import StreamDetokenizer, byte_table
from moestro.server.tokenizer import Tokenizer
from tests.fakes import (
    BOS,
    EOS,
    FIRST_BYTE,
    SPECIAL,
    byte_tokenizer,
    fallback_tokenizer,
    spelled,
    write_tokenizer,
)
from tests.server.conftest import Make

WORDS = ("▁the", "▁lamp", "and", "▁and", "s", "▁")
FALLBACK = fallback_tokenizer(WORDS)
BYTE_LEVEL = byte_tokenizer((b"\xf0\x9f", b"\x98\x80", b"the"))


async def test_case_10_a_cut_character_comes_whole(make: Make) -> None:
    async with make("a😀b", pieces=(b"\xf0\x9f", b"\x98\x80")) as server:
        assert len(spelled("😀")) > 1
        events = await server.chat_events()
        deltas = [c["delta"]["content"] for c in events.of(0) if c["delta"].get("content")]
        assert deltas == ["a", "😀", "b"]
        whole = (await server.chat()).json()["choices"][0]["message"]["content"]
        assert whole == events.text() == "a😀b"


async def test_case_10_logprobs_ride_with_the_whole_character(make: Make) -> None:
    async with make("a😀b") as server:
        events = await server.chat_events(logprobs=True)
        counts = [len(c["logprobs"]["content"]) for c in events.of(0) if c["logprobs"]]
        assert counts == [1, 4, 1]
        emoji = next(c for c in events.of(0) if c["delta"].get("content") == "😀")
        raw = [byte for entry in emoji["logprobs"]["content"] for byte in entry["bytes"]]
        assert bytes(raw).decode() == "😀"


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_case_11_a_character_cut_at_the_end_is_one_replacement(make: Make, cut: int) -> None:
    async with make("😀") as server:
        body = (await server.chat(max_tokens=cut)).json()
        assert body["choices"][0]["message"]["content"] == "\ufffd"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == cut
        events = await server.chat_events(max_tokens=cut)
        assert events.text() == "\ufffd"
        assert events.finish() == "length"


async def test_case_12_bytes_that_are_no_text(make: Make) -> None:
    async with make(b"ok\xff\xfe\xc3(end") as server:
        want = "ok\ufffd\ufffd\ufffd(end"
        body = (await server.chat(logprobs=True)).json()
        assert body["choices"][0]["message"]["content"] == want
        raw = [b for entry in body["choices"][0]["logprobs"]["content"] for b in entry["bytes"]]
        assert bytes(raw) == b"ok\xff\xfe\xc3(end"
        assert (await server.chat_events()).text() == want


async def test_case_12_completions_keep_the_bytes_of_such_tokens(make: Make) -> None:
    async with make(b"a\xff") as server:
        body = (await server.complete(logprobs=0)).json()
        assert body["choices"][0]["logprobs"]["tokens"] == ["a", "bytes:\\xff"]


async def test_case_14_two_thousand_random_tokens(make: Make) -> None:
    rng = random.Random(14)
    tokens = [rng.choice((FIRST_BYTE + rng.randrange(256), 0, 2, 600)) for _ in range(2000)]
    want = Tokenizer(byte_tokenizer()).decode(tokens, skip_special=True)
    async with make(tokens, engine={"per_step": 7}) as server:
        events = await server.complete_events(max_tokens=2000)
        assert events.text() == want
        body = (await server.complete(max_tokens=2000)).json()
        assert body["choices"][0]["text"] == want


def test_case_14_the_librarys_stream_may_give_up() -> None:
    backend = fallback_tokenizer(WORDS)
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(3, 3 + 256 + len(WORDS)) for _ in range(rng.randrange(1, 40))]
        detokenizer = StreamDetokenizer(backend, skip_special=True)
        text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
        assert isinstance(text, str)


BODIES: dict[str, tuple[bytes, int]] = {
    "not utf-8": (b'{"prompt":"\xc4\xe3"}', 400),
    "bom": (b'\xef\xbb\xbf{"prompt":"a"}', 200),
    "lone surrogate": (b'{"prompt":"\\ud800"}', 400),
    "lone surrogate in the middle": (b'{"prompt":"a\\udc00bcdefghijk"}', 400),
    "surrogate pair": (b'{"prompt":"\\ud83d\\ude00"}', 200),
    "nul": (b'{"prompt":"a\\u0000b"}', 200),
    "nan": (b'{"prompt":"a","temperature":NaN}', 400),
    "infinity": (b'{"prompt":"a","temperature":1e999}', 400),
    "truncated": (b'{"prompt":"a', 400),
    "array": (b"[1]", 400),
    "deep": (b"[" * 100_000, 400),
    "empty": (b"", 400),
}


@pytest.mark.parametrize("name", BODIES)
async def test_case_15_bodies_that_are_no_json(make: Make, name: str) -> None:
    body, status = BODIES[name]
    async with make("x") as server:
        response = await server.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == status
        if status != 200:
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await server.complete()).status_code == 200


async def test_case_15_content_types(make: Make) -> None:
    async with make("x") as server:
        for kind, status in (
            ("application/json", 200),
            ("application/json; charset=utf-8", 200),
            ("text/plain", 200),
            (None, 200),
            ("application/x-www-form-urlencoded", 400),
            ("multipart/form-data; boundary=x", 400),
        ):
            headers = {} if kind is None else {"content-type": kind}
            response = await server.post(
                "/v1/completions", content=b'{"prompt":"a"}', headers=headers
            )
            assert response.status_code == status
            if status == 400:
                assert "content-type" in response.json()["error"]["message"]


@given(st.lists(st.integers(0, 300), max_size=60))
@settings(max_examples=200, deadline=None)
def test_byte_level_text_is_the_librarys(tokens: list[int]) -> None:
    backend = BYTE_LEVEL
    detokenizer = Tokenizer(backend).detokenizer(skip_special=True)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert text == backend.decode(tokens, skip_special_tokens=True)


@given(st.text(max_size=20), st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_byte_fallback_text_is_the_librarys_where_it_is_valid(text: str, group: int) -> None:
    backend = FALLBACK
    vocabulary = backend.get_vocab()
    tokens = [vocabulary["▁the"], *(3 + byte for byte in text.encode()), vocabulary["▁lamp"]]
    detokenizer = Tokenizer(backend).detokenizer(skip_special=True)
    groups = [tokens[i : i + group] for i in range(0, len(tokens), group)]
    found = "".join(map(detokenizer.push_many, groups)) + detokenizer.flush()
    assert found == backend.decode(tokens, skip_special_tokens=True) == f"the{text} lamp"


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = Tokenizer(fallback_tokenizer(WORDS))
    tokens = [tokenizer.encode("s", special=False)[0], 3 + 256]
    space = [3 + 256, 3 + 257]
    for continuing, want in ((False, "the lamp"), (True, " the lamp")):
        detokenizer = tokenizer.detokenizer(skip_special=True, continuing=continuing)
        assert detokenizer.push_many(space) + detokenizer.flush() == want
    assert tokenizer.decode(tokens, skip_special=True) == "s the"


def test_only_one_leading_space_is_stripped() -> None:
    tokenizer = Tokenizer(fallback_tokenizer(WORDS))
    blank = 3 + 256 + WORDS.index("▁")
    detokenizer = tokenizer.detokenizer(skip_special=True)
    assert "".join([detokenizer.push(blank), detokenizer.push(blank)]) == " "


def test_other_decoders_go_through_the_library() -> None:
    vocabulary = {"un": 0, "##happy": 1, "day": 2, "[UNK]": 3}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##")
    assert byte_table(backend) is None
    tokenizer = Tokenizer(backend)
    for ids in ([0, 1, 2], [2, 2, 0, 1], [1]):
        detokenizer = tokenizer.detokenizer(skip_special=True)
        text = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
        assert text == backend.decode(ids)
        assert tokenizer.decode(ids, skip_special=True) == text
    assert tokenizer.bytes_of(2) == b"day"


async def test_special_tokens_can_be_shown(make: Make) -> None:
    async with make([*spelled("a"), 3, *spelled("b")]) as server:
        assert (await server.chat()).json()["choices"][0]["message"]["content"] == "ab"
        shown = await server.chat(skip_special_tokens=False)
        assert shown.json()["choices"][0]["message"]["content"] == f"a{SPECIAL[3]}b"
        refused = await server.chat(spaces_between_special_tokens=False)
        assert refused.json()["error"]["param"] == "spaces_between_special_tokens"


async def test_u2028_is_escaped_everywhere(make: Make) -> None:
    text = "a\u2028b\u2029c\u0085d\x7f\x00\u00e9"
    async with make(text) as server:
        response = await server.chat(stream=True)
        assert response.content.isascii()
        assert (await server.chat_events()).text() == text
        response = await server.chat()
        assert response.content.isascii()
        assert response.json()["choices"][0]["message"]["content"] == text


def test_a_tokenizer_is_read_from_its_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(bos=True))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer.encode("a", special=True) == [BOS, FIRST_BYTE + ord("a")]
    assert tokenizer.encode("a", special=False) == [FIRST_BYTE + ord("a")]
    assert tokenizer.encode(f"a{SPECIAL[EOS]}", special=False)[-1] == EOS
    assert tokenizer.special_tokens["eos_token"] == SPECIAL[EOS]


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [BOS, FIRST_BYTE]),
        ({"add_bos_token": False}, [FIRST_BYTE]),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS, FIRST_BYTE, EOS]),
        ({"add_eos_token": True}, [FIRST_BYTE, EOS]),
    ],
)
def test_bos_and_eos_follow_the_config(
    tmp_path: Path, config: dict[str, Any], ids: list[int]
) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(bos=True), **config)
    assert Tokenizer.from_checkpoint(tmp_path).encode("\0", special=True) == ids


def test_truncation_and_padding_of_the_file_are_dropped(tmp_path: Path) -> None:
    backend = byte_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    write_tokenizer(tmp_path, backend)
    assert len(Tokenizer.from_checkpoint(tmp_path).encode("abcdef", special=True)) == 6


def test_named_tokens_become_special(tmp_path: Path) -> None:
    backend = byte_tokenizer()
    write_tokenizer(tmp_path, backend, additional_special_tokens=[{"content": "Z"}, "missing!"])
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    ids = tokenizer.encode("aZ", special=False)
    assert tokenizer.decode(ids, skip_special=True) == "a"
    assert tokenizer.size == backend.get_vocab_size()


def test_damaged_tokenizers_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        Tokenizer.from_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="tokenizer_config"):
        Tokenizer.from_checkpoint(tmp_path)
