"""`moestro bench serve`: exact against a scripted server and a fake clock, and against the real
HTTP side."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moestro.errors import ConfigError, MoestroError, Unavailable
from moestro.server import cli, cli_bench_report
from moestro.server.cli_bench_client import Server, asked, fetched, server_of
from moestro.server.cli_bench_load import Pace, arrivals, run_load, timed
from moestro.server.cli_bench_prompts import Ask, Shape, random_asks, recorded_asks
from moestro.server.cli_bench_serve import _plan, measure_served
from moestro.server.cli_bench_show_serve import show_served
from tests.server.conftest import Make


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOESTRO_API_KEY", raising=False)
    monkeypatch.setattr(cli_bench_report, "machine", lambda: {})


async def leave(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the client may be faster
        writer.close()
        await writer.wait_closed()


class Scripted:
    """Answers with `pieces`, written one at a time; keeps what it was asked."""

    def __init__(self, pieces: list[bytes], status: int = 200, head: str = "") -> None:
        self.pieces, self.status, self.head = pieces, status, head
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.together = self.most = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(fields.get("Content-Length", 0)))
        self.asked.append((lines[0], fields, json.loads(body) if body else None))
        self.together += 1
        self.most = max(self.most, self.together)
        writer.write(f"HTTP/1.1 {self.status} X\r\n{self.head}\r\n".encode())
        for piece in self.pieces:
            await asyncio.sleep(0.002)
            self.together -= piece is self.pieces[-1]
            writer.write(piece)
        await leave(writer)

    @asynccontextmanager
    async def listening(self, **more: Any) -> AsyncIterator[Server]:
        answers: list[asyncio.Task[None]] = []

        def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers.append(asyncio.ensure_future(self.answer(reader, writer)))

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            yield Server("127.0.0.1", server.sockets[0].getsockname()[1], False, "", **more)
        await asyncio.gather(*answers)


def ticking(*times: float) -> Callable[[], float]:
    left: Iterator[float] = iter(times)
    return lambda: next(left)


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def token(*ids: int, text: str = "") -> bytes:
    return event({"choices": [{"text": text, "token_ids": list(ids)}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
DONE = b"data: [DONE]\n\n"
ASK = Ask("/v1/completions", {"prompt": [1]})


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


# --- one stream -----------------------------------------------------------------------------


async def test_times_are_those_of_pieces_with_tokens() -> None:
    script = Scripted(
        [token(1), event({"choices": [{"text": ""}]}), token(2), token(3, 4), USAGE, DONE]
    )
    async with script.listening(key="sesame") as server:
        stream = await timed(server, "m", ASK, ticking(10.0, 12.0, 12.5, 13.5))
    assert (stream.first, stream.gaps) == (2.0, [0.5, 1.0])
    assert (stream.prompt_tokens, stream.tokens, stream.error) == (5, 4, None)
    line, fields, body = script.asked[0]
    assert line == "POST /v1/completions HTTP/1.1"
    assert fields["Authorization"] == "Bearer sesame"
    assert body == {"model": "m", "prompt": [1]}


async def test_chunks_may_cut_events_anywhere() -> None:
    whole = token(text="a") + event({"choices": [{"delta": {"content": "b"}}]}) + USAGE + DONE
    pieces = [chunked(whole[at : at + 7]) for at in range(0, len(whole), 7)]
    script = Scripted([*pieces, b"0\r\n\r\n"], head="Transfer-Encoding: chunked\r\n")
    async with script.listening() as server:
        stream = await timed(server, "m", ASK, ticking(0.0, 1.0, 3.0))
    assert (stream.first, stream.gaps, stream.tokens) == (1.0, [2.0], 4)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Scripted([token(1)]), "a stream ended without"),
        (Scripted([event({"error": {"message": "a bad day"}})]), "a bad day"),
        (Scripted([b'{"error": {"message": "no"}}'], 503), "/v1/completions answered 503: no"),
        (Scripted([b"gone"], 502), "answered 502: gone"),
        (Scripted([b"xyz\r\n"], head="Transfer-Encoding: chunked\r\n"), "broke off"),
    ],
)
async def test_failed_streams_say_why(script: Scripted, error: str) -> None:
    async with script.listening() as server:
        stream = await timed(server, "m", ASK, lambda: 0.0)
    assert error in (stream.error or "")


async def test_no_server_at_all() -> None:
    async with Scripted([]).listening() as server:
        pass
    with pytest.raises(Unavailable, match=r"cannot reach 127\.0\.0\.1"):
        await fetched(server, "/v1/models")


async def test_something_that_is_no_http_server() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\r\n")
        await leave(writer)

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match="no HTTP server"):
            async with asked(Server("127.0.0.1", port, False, ""), "/"):
                raise AssertionError("answered")


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://a:81", Server("a", 81, False, "")),
        ("http://a:81/v1/", Server("a", 81, False, "")),
        ("https://a/x/v1", Server("a", 443, True, "/x")),
        ("http://[::1]", Server("::1", 80, False, "")),
    ],
)
def test_addresses(url: str, server: Server) -> None:
    assert server_of(url, None) == server


# --- many -----------------------------------------------------------------------------------


async def test_so_many_at_a_time() -> None:
    script = Scripted([token(1), token(2), USAGE, DONE])
    async with script.listening() as server:
        streams = await run_load(server, "m", [ASK] * 9, Pace(concurrency=3))
    assert (len(streams), script.most) == (9, 3)
    assert all(stream.error is None for stream in streams)


async def test_arrivals_at_a_rate() -> None:
    times = list(arrivals(4000, Pace(rate=50.0, seed=1)))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.05)
    above = sum(gap > mean for gap in gaps) / len(gaps)
    assert above == pytest.approx(0.368, abs=0.03)  # exp(-1): no memory
    assert times == list(arrivals(4000, Pace(rate=50.0, seed=1)))
    script = Scripted([token(1), USAGE, DONE])
    async with script.listening() as server:
        streams = await run_load(server, "m", [ASK] * 5, Pace(rate=1000.0))
    assert [stream.error for stream in streams] == [None] * 5


# --- prompts --------------------------------------------------------------------------------


def test_random_prompts() -> None:
    asks = random_asks(Shape(6, 4), 3, 9, vocab=100, seed=1)
    prompts = [ask.body["prompt"] for ask in asks]
    assert [len(prompt) for prompt in prompts] == [10] * 3
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == 3
    assert all(8 <= token < 100 for prompt in prompts for token in prompt)
    assert asks[0].body["max_tokens"] == 9
    assert asks[0].body["ignore_eos"] is True
    assert asks == random_asks(Shape(6, 4), 3, 9, vocab=100, seed=1)


def test_a_data_set(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    file.write_text(f'{{"prompt": "a", "id": 7}}\n\n{json.dumps({"messages": messages})}\n')
    plain, chat = recorded_asks(file, None, 5)
    assert (plain.path, plain.body["prompt"]) == ("/v1/completions", "a")
    assert (chat.path, chat.body["messages"]) == ("/v1/chat/completions", messages)
    assert "ignore_eos" not in chat.body
    assert recorded_asks(file, 1, 5) == [plain]


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        ("", None, "has no prompts"),
        ('{"prompt": "a"}', 2, "--num-prompts is 2, but .* has 1"),
        ('{"prompt": "a"}\nnonsense', None, "line 2: should be a JSON object"),
        ('{"text": "a"}', None, "line 1: should be"),
        ('{"prompt": "a", "messages": []}', None, "line 1: should be"),
    ],
)
def test_bad_data_sets(tmp_path: Path, text: str, count: int | None, message: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        recorded_asks(file, count, 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-rate", "2", "--concurrency", "2"], "one or the other paces the load"),
        (["--request-rate", "0"], "more than 0"),
        (["--base-url", "localhost:8000"], "should be like http://host:8000"),
        (["--base-url", "http://a:b"], "--base-url http://a:b"),
        (["--dataset", "./none"], "cannot read the data set none"),
        (["--dataset", "d", "--shared-prefix", "3"], "--shared-prefix is for random prompts"),
        (["x"], "takes flags only, not x"),
        (["--gpu-memory", "1g"], "unknown flag --gpu-memory"),
    ],
)
def test_bad_command_lines(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _plan({}).server.key is None
    monkeypatch.setenv("MOESTRO_API_KEY", "one, two")
    assert _plan({}).server.key == "one"
    assert _plan({"api_key": "three"}).server.key == "three"


# --- against the real HTTP side -------------------------------------------------------------


def plan(port: int, **values: Any) -> Any:
    return _plan({"base_url": f"http://127.0.0.1:{port}/v1", "link_gbps": 1.0, **values})


async def test_a_server_is_driven(listen: Make, capsys: pytest.CaptureFixture[str]) -> None:
    async with listen("hello", engine={"delay": 0.001}) as server:
        values = {"num_prompts": 5, "output_len": 7, "input_len": 9, "concurrency": 2}
        result = await measure_served(plan(server.port, shared_prefix=3, **values))
        opened = server.engine.opened
    assert {len(request.prompt) for request in opened} == {12}
    assert len({request.prompt[:3] for request in opened}) == 1
    assert (result["model"], result["failed"]) == ("tiny", 0)
    assert result["load"] == {
        "requests": 5,
        "prompts": "shared prefix",
        "input_len": 9,
        "shared_prefix": 3,
        "output_len": 7,
        "request_rate": None,
        "concurrency": 2,
        "seed": 0,
    }
    assert result["prefill"]["tokens"] == 5 * 12
    assert result["prefill"]["time_to_first_token"]["count"] == 5
    assert result["decode"]["tokens"] == 5 * 7
    assert result["decode"]["gap"]["count"] == 5 * 6
    assert set(result["engine"]["cache"]) >= {"slot_hits", "misses", "host_bytes"}
    assert result["bound"]["link_source"] == "as --link-gbps says"
    assert result["bound"]["floor_measured"] is False
    assert result["bound"]["share"] == pytest.approx(1.0)  # the fake engine fetches nothing
    show_served(result, sys.stdout)
    text = capsys.readouterr().out
    assert "5 requests (shared prefix), 2 at a time" in text
    assert "token gap p50" in text


async def test_a_data_set_at_a_rate(listen: Make, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    async with listen("hello") as server:
        result = await measure_served(plan(server.port, dataset=file, request_rate=200.0))
    assert (result["failed"], result["load"]["requests"]) == (0, 2)
    assert result["load"]["request_rate"] == 200.0
    assert result["decode"]["tokens"] == 2 * 6  # hello and EOS, twice


async def test_what_the_model_cannot_take_is_refused_first(listen: Make) -> None:
    async with listen("hello") as server:
        with pytest.raises(ConfigError, match="the model's context is"):
            await measure_served(plan(server.port, input_len=10**6))
        with pytest.raises(ConfigError, match="no model other, only tiny, org/tiny"):
            await measure_served(plan(server.port, model="other"))
        assert server.engine.opened == []


async def test_when_all_fail_the_first_reason_is_the_error(listen: Make) -> None:
    async with listen("hello") as server:
        with pytest.raises(
            MoestroError, match=r"all 3 requests failed; the first: .*from 0 to 511"
        ):
            await measure_served(plan(server.port, num_prompts=3, vocab=10**6))


async def test_another_server_without_counters() -> None:
    """It lists a model, answers streams, and knows no /admin/stats."""

    class Other(Scripted):
        async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            if b"/v1/models" in line:
                writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m"}]}')
            elif b"/admin" in line:
                writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + token(text="a") + USAGE + DONE)
            await leave(writer)

    async with Other([]).listening() as server:
        with pytest.raises(ConfigError, match="give --vocab"):
            await measure_served(plan(server.port))
        result = await measure_served(plan(server.port, vocab=50, num_prompts=2))
    assert (result["engine"], result["bound"], result["decode"]["tokens"]) == (None, None, 8)
