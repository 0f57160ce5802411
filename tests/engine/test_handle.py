"""The engine dies, stalls or cannot come back: who goes on, who gets an error, who waits."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moestro.config import Config
from moestro.engine import link
from moestro.engine.handle import EngineHandle
from moestro.engine.messages import Progress
from moestro.engine.restarts import Restarts
from moestro.errors import EngineDead, OutOfMemory, QueueFull, Unavailable
from moestro.types import Finish, Request, SamplingParams
from tests.engine import fake_engine
from tests.engine.fake_engine import FINE, LAST_WORD, POISON, SLEEPY

PATIENCE = 20.0


def fake(folder: Path, most: int = 3, **settings: Any) -> EngineHandle:
    """A handle whose engines are fake ones."""
    return EngineHandle(
        Config.model_validate(settings),
        Path("."),
        restarts=Restarts(most, delays=(0.0,)),
        command=(sys.executable, str(Path(fake_engine.__file__)), str(folder)),
    )


@asynccontextmanager
async def handle(folder: Path, most: int = 3, **settings: Any) -> AsyncIterator[EngineHandle]:
    """A handle with a fake engine that is ready."""
    engine = fake(folder, most, **settings)
    await engine.start()
    try:
        await until(lambda: engine.state == "ready")
        yield engine
    finally:
        await engine.aclose()


async def until(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not wanted():
            await asyncio.sleep(0.005)


def request(id: str, tokens: int = 60, kind: int = FINE, at: int = 0) -> Request:
    return Request(id, (kind, at), SamplingParams(max_tokens=tokens))


class Reader:
    """Reads one request to its end."""

    def __init__(self, engine: EngineHandle, wanted: Request) -> None:
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.error: str | None = None
        self.stream = engine.open([wanted])
        self.task = asyncio.create_task(self._read())
        # A reader that nobody waits for may end with an error. Python would report it whenever
        # the garbage is collected: in another test, where its traceback breaks a parser at work.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _read(self) -> None:
        async with self.stream as stream:
            async for batch in stream.batches():
                for event in batch:
                    assert self.finish is None
                    self.tokens += event.token_ids
                    self.finish, self.error = event.finish, event.error

    async def done(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.task


def lives(folder: Path) -> list[str]:
    """What each engine was given."""
    return [line.strip() for line in (folder / "lives").read_text().split("\n")][1:]


def counted(tokens: int) -> list[int]:
    return list(range(1, tokens + 1))


async def test_streams_go_on_where_they_stopped(tmp_path: Path) -> None:
    async with handle(tmp_path) as engine:
        readers = [Reader(engine, request(id)) for id in "abc"]
        await until(lambda: all(len(r.tokens) > 5 for r in readers))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting")
        late = Reader(engine, request("late"))
        assert (await engine.stats(0.1)).scheduler.waiting == 4
        for reader in (*readers, late):
            await reader.done()
            assert (reader.tokens, reader.finish) == (counted(60), Finish.LENGTH)
        assert engine.restarts == 1
        first, second = lives(tmp_path)
        assert first == "a:0 b:0 c:0"
        assert [word.split(":")[0] for word in second.split()] == ["a", "b", "c", "late"]
        assert second.endswith("late:0")
        assert (await engine.stats(1)).scheduler.running == 0


async def test_the_queue_has_its_limit_while_the_engine_restarts(tmp_path: Path) -> None:
    async with handle(tmp_path, max_num_seqs=1, max_num_queued=2) as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting")
        readers = [Reader(engine, request(id)) for id in "abc"]
        with pytest.raises(QueueFull):
            engine.open([request("d")])
        for reader in readers:
            await reader.done()
            assert reader.tokens == counted(60)


async def test_leaving_during_a_restart_leaves_nothing(tmp_path: Path) -> None:
    async with handle(tmp_path) as engine:
        readers = [Reader(engine, request(id, 4000)) for id in "ab"]
        await until(lambda: all(reader.tokens for reader in readers))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting")
        for reader in readers:
            reader.task.cancel()
        await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
        assert (await engine.stats(0.1)).scheduler.waiting == 0
        await until(lambda: engine.state == "ready")
        assert (await engine.stats(1)).scheduler.running == 0
        assert lives(tmp_path)[1] == ""


async def test_an_end_that_was_not_heard_is_said(tmp_path: Path) -> None:
    async with handle(tmp_path) as engine:
        reader = Reader(engine, request("a", 10, LAST_WORD))
        await reader.done()
        assert (reader.tokens, reader.finish) == (counted(10), Finish.LENGTH)


async def test_a_stalled_engine_is_seen_and_replaced(tmp_path: Path) -> None:
    async with handle(tmp_path, engine_stall_timeout=0.6) as engine:
        await asyncio.sleep(0.7)  # an idle engine may be silent
        assert (engine.stalled, engine.restarts) == (False, 0)
        reader = Reader(engine, request("a", 40, SLEEPY, 20))
        await until(lambda: engine.stalled)
        assert engine.state == "ready"
        await until(lambda: engine.state == "restarting")
        assert "no sign of life for 0.6 s" in (engine.error or "")
        await reader.done()
        assert reader.tokens == counted(40)
        assert engine.error is None


async def test_an_engine_that_hangs_while_it_loads_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mute").write_text("0")
    (tmp_path / "slow").write_text("3")  # longer than it may be silent, but it reports
    engine = fake(tmp_path, engine_load_timeout=2)
    await engine.start()
    try:
        await until(lambda: engine.stalled)
        assert (engine.state, engine.restarts) == ("loading", 0)
        await until(lambda: engine.restarts == 1)
        assert engine.state == "loading"  # it never served: requests are refused, not kept
        assert "no sign of life for 2 s while it was loading" in (engine.error or "")
        with pytest.raises(Unavailable, match="loading"):
            engine.open([request("early")])
        await until(lambda: engine.progress[0] == "experts")
        assert not engine.stalled
        await until(lambda: engine.state == "ready")
        assert (engine.error, engine.restarts) == (None, 1)
        reader = Reader(engine, request("a"))
        await reader.done()
        assert reader.tokens == counted(60)
    finally:
        await engine.aclose()


async def test_streams_outlive_an_engine_that_hangs_while_it_loads(tmp_path: Path) -> None:
    (tmp_path / "mute").write_text("1")
    async with handle(tmp_path, engine_load_timeout=3) as engine:
        reader = Reader(engine, request("a", 400))
        await until(lambda: bool(reader.tokens))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting" and engine.stalled)
        await reader.done()
        assert (reader.tokens, engine.restarts) == (counted(400), 2)


async def test_an_engine_that_always_hangs_ends_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "mute").write_text("0 1 2 3")
    engine = fake(tmp_path, 2, engine_load_timeout=0.7)
    await engine.start()
    try:
        await until(lambda: engine.state == "dead")
        assert engine.restarts == 2
        assert re.fullmatch(
            r"the engine process gave no sign of life for 0\.7 s while it was loading \(.*\), "
            r"and it was restarted 2 times without getting ready",
            engine.error or "",
        )
        with pytest.raises(EngineDead):
            engine.open([request("a")])
    finally:
        await engine.aclose()


async def test_an_engine_that_cannot_be_killed_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "KILL_SECONDS", 0.2)
    async with handle(tmp_path, engine_stall_timeout=0.5) as engine:
        assert engine._link is not None
        process = engine._link._process
        kill = process.kill
        monkeypatch.setattr(process, "kill", lambda: None)
        reader = Reader(engine, request("a", 40, SLEEPY, 20))
        await reader.done()
        assert reader.tokens == counted(40)
        kill()
        process.wait()


@pytest.mark.parametrize("at", [0, 8])
async def test_a_request_that_kills_engines_is_given_up_and_the_others_go_on(
    tmp_path: Path, at: int
) -> None:
    async with handle(tmp_path) as engine:
        innocent = [Reader(engine, request(id, 150)) for id in "ab"]
        poison = Reader(engine, request("p", 150, POISON, at))
        innocent += [Reader(engine, request(id, 150)) for id in "cd"]
        await poison.done()
        assert poison.finish is Finish.ERROR
        assert "not for the first time" in (poison.error or "")
        assert poison.tokens == counted(at)
        for reader in innocent:
            await reader.done()
            assert reader.tokens == counted(150)
        assert engine.restarts <= 3


async def test_alone_it_is_given_up_at_its_third_crash(tmp_path: Path) -> None:
    async with handle(tmp_path) as engine:
        poison = Reader(engine, request("p", 50, POISON, 5))
        await poison.done()
        assert poison.finish is Finish.ERROR
        assert lives(tmp_path)[:3] == ["p:0", "p:5", "p:5"]
        after = Reader(engine, request("a"))
        await after.done()
        assert after.tokens == counted(60)


@pytest.mark.parametrize(
    ("file", "most", "said"),
    [("crash", 2, "restarted 2 times within 10 minutes"), ("fail", 3, "do not fit any more")],
)
async def test_an_engine_that_cannot_come_back_ends_everything_once(
    tmp_path: Path, file: str, most: int, said: str
) -> None:
    async with handle(tmp_path, most) as engine:
        readers = [Reader(engine, request(id, 4000)) for id in "ab"]
        await until(lambda: all(reader.tokens for reader in readers))
        (tmp_path / file).touch()
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSEGV)
        for reader in readers:
            with pytest.raises(EngineDead, match=said):
                await reader.done()
        assert engine.state == "dead"
        assert said in (engine.error or "")
        assert isinstance(engine.failure, OutOfMemory) == (file == "fail")
        with pytest.raises(EngineDead):
            engine.open([request("c")])


async def test_closing_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    async with handle(tmp_path) as engine:
        engine._budget.delays = (60.0,)
        reader = Reader(engine, request("a", 4000))
        await until(lambda: bool(reader.tokens))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting")
        async with asyncio.timeout(5):
            await engine.aclose()
        with pytest.raises(EngineDead, match="closing"):
            await reader.done()


async def test_before_the_first_engine_is_ready_nothing_is_restarted(tmp_path: Path) -> None:
    engine = EngineHandle(Config(), tmp_path, command=(sys.executable, "-c", "exit(3)"))
    await engine.start()
    try:
        with pytest.raises((Unavailable, EngineDead)):
            engine.open([request("a")])
        await until(lambda: engine.state == "dead")
        assert "ended with code 3" in (engine.error or "")
        assert engine.restarts == 0
    finally:
        await engine.aclose()


async def test_an_engine_that_is_faster_than_the_server_leaves_time_to_others() -> None:
    """Receiving does not wait while there is a message, so nothing else would run any more."""
    began = time.monotonic()

    class Flood:
        def recv(self) -> asyncio.Future[bytes]:
            assert time.monotonic() - began < 5, "nobody else got a turn"
            ready: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            ready.set_result(msgspec.msgpack.encode([Progress("weights", 1, 2)]))
            return ready

    heard: list[object] = []
    flooded = link.Link.__new__(link.Link)
    flooded._socket, flooded._hear = Flood(), heard.append  # type: ignore[assignment]
    listening = asyncio.create_task(flooded._listen())
    for _ in range(3):
        await asyncio.sleep(0)
        assert not listening.done()
    listening.cancel()
    assert len(heard) > 1, "what has come is read in one go"
