"""The server's side of the engine process: start it, talk to it, notice when it dies.

Owns: the process, the socket and one queue per open stream. All methods run on the event loop.
Never loads torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from moestro import errors
from moestro.config import Config
from moestro.engine.messages import (
    Abort,
    Add,
    AskStats,
    EngineInfo,
    Events,
    Failed,
    Progress,
    Stats,
    Stop,
    ToEngine,
    ToServer,
)
from moestro.errors import EngineDead, InvalidRequest, MoestroError, Unavailable
from moestro.scheduler.limits import Limits, check
from moestro.stats import EngineStats
from moestro.types import Request, TokenEvent

STALL_SECONDS = 30.0  # requests are open and the engine has said nothing for this long
STOP_SECONDS = 5.0  # between asking the process to stop and killing it


class Stream:
    """Events of a few sequences. Leaving the context aborts what has not finished."""

    def __init__(self, handle: EngineHandle, ids: Sequence[str]) -> None:
        self._handle = handle
        self._open = set(ids)
        self._pending: list[TokenEvent] = []
        self._arrived = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for id in tuple(self._open):
            self.abort(id)

    async def batches(self) -> AsyncIterator[list[TokenEvent]]:
        """Everything that has arrived since the last batch, until all sequences are finished.

        Raises EngineDead when the engine ends first.
        """
        while self._open or self._pending:
            if not self._pending:
                if self._handle.state == "dead":
                    raise EngineDead(self._handle.error or "the engine stopped")
                self._arrived.clear()
                await self._arrived.wait()
                continue
            batch, self._pending = self._pending, []
            yield batch

    def abort(self, id: str) -> None:
        """End one sequence; it gives no further event. Harmless when it has ended."""
        if id in self._open:
            self._open.discard(id)
            self._handle.drop(id)
            self._arrived.set()

    def push(self, event: TokenEvent) -> None:
        """Called by the handle."""
        self._pending.append(event)
        if event.finish is not None:
            self._open.discard(event.id)
        self._arrived.set()

    def wake(self) -> None:
        """Called by the handle when the engine's state has changed."""
        self._arrived.set()


class EngineHandle:
    """Starts the engine process and gives access to it."""

    def __init__(self, config: Config, model_path: Path) -> None:
        self._config = config
        self._model = model_path
        self.state = "loading"  # "loading" | "ready" | "dead"
        self.progress: tuple[str, int, int] = ("starting", 0, 1)
        self.error: str | None = None
        self.failure: MoestroError | None = None  # why start-up failed
        self.info: EngineInfo | None = None
        self.snapshot = EngineStats()
        self._limits: Limits | None = None
        self._streams: dict[str, Stream] = {}
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}
        self._numbers = itertools.count(1)
        self._last_word = time.monotonic()
        self._outgoing: list[ToEngine] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._process: subprocess.Popen[bytes] | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        self._folder = tempfile.TemporaryDirectory(prefix="moestro-")
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._process is None else self._process.pid

    @property
    def stalled(self) -> bool:
        """Requests are open, and the engine has not said a word for STALL_SECONDS."""
        quiet = time.monotonic() - self._last_word
        return self.state == "ready" and bool(self._streams) and quiet > STALL_SECONDS

    async def start(self) -> None:
        """Start the process. Returns at once; `state` and `progress` tell how loading goes."""
        address = f"ipc://{self._folder.name}/engine.sock"
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moestro.engine.process"], stdin=subprocess.PIPE
        )
        line = {"address": address, "model": str(self._model), "config": self._config.to_json()}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    def open(self, requests: Sequence[Request]) -> Stream:
        """Submit sequences, all or none. Raises what `scheduler.limits.check` raises, Unavailable
        while loading, EngineDead when the engine is gone."""
        self._require_ready()
        assert self._limits is not None
        most = self._limits.max_num_seqs + self._limits.max_num_queued
        if len(requests) > most:
            raise InvalidRequest(
                f"The request asks for {len(requests)} sequences; this server holds {most} at most."
            )
        waiting = len(self._streams) - self._limits.max_num_seqs
        for number, request in enumerate(requests):
            check(request, self._limits, waiting + number)
        stream = Stream(self, [request.id for request in requests])
        for request in requests:
            self._streams[request.id] = stream
            self._post(Add(request))
        return stream

    def drop(self, id: str) -> None:
        """Abort one sequence."""
        if self._streams.pop(id, None) is not None:
            self._post(Abort(id))

    async def stats(self, timeout: float) -> EngineStats:
        """A fresh snapshot, or the last one when the engine does not answer within `timeout`."""
        if self.state != "ready":
            return self.snapshot
        number = next(self._numbers)
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._post(AskStats(number))
        try:
            return await asyncio.wait_for(future, timeout)
        except (TimeoutError, EngineDead):
            return self.snapshot
        finally:
            self._asked.pop(number, None)

    async def aclose(self) -> None:
        """Stop the process and free everything; harmless when done before. Open streams end with
        EngineDead."""
        if self._closed:
            return
        self._closed = True
        self._die("the server is closing")
        if self._process is not None:
            await self._stop(self._process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        self._folder.cleanup()

    async def _stop(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        if process.poll() is None:
            with contextlib.suppress(zmq.ZMQError, TimeoutError):
                stop = self._encoder.encode([Stop()])
                await asyncio.wait_for(self._socket.send(stop), STOP_SECONDS)
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        process.wait()

    def _require_ready(self) -> None:
        if self.state == "dead":
            raise EngineDead(self.error or "the engine stopped")
        if self.state == "loading":
            raise Unavailable("the model is still loading", code="loading")

    def _post(self, message: ToEngine) -> None:
        """Send with everything else that this turn of the event loop posts."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if self.state == "ready":
            # The high-water mark is off: this never waits, so nobody awaits the future.
            self._socket.send(self._encoder.encode(messages))

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(list[ToServer])
        while True:
            data = await self._socket.recv()
            self._last_word = time.monotonic()
            for message in decoder.decode(data):
                self._handle(message)

    def _handle(self, message: ToServer) -> None:
        match message:
            case Events(events):
                self._deliver(events)
            case Stats(number, stats):
                self.snapshot = stats
                if number in self._asked and not self._asked[number].done():
                    self._asked[number].set_result(stats)
            case Progress(stage, done, total):
                self.progress = (stage, done, total)
            case EngineInfo():
                self._ready(message)
            case Failed(kind, text, param):
                failure = getattr(errors, kind, MoestroError)
                self.failure = failure(text, param=param)
                self._die(text)

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.id)
            if stream is None:
                continue
            if event.finish is not None:
                del self._streams[event.id]
            stream.push(event)

    def _ready(self, info: EngineInfo) -> None:
        self.info = info
        self._limits = Limits(
            max_model_len=info.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            max_num_queued=self._config.max_num_queued,
            vocab_size=info.vocab_size,
            kv_tokens=info.kv_tokens,
            max_sweep_tokens=self._config.max_sweep_tokens,
        )
        self.state = "ready"

    async def _watch(self) -> None:
        """Notice the end of the process within a tenth of a second."""
        assert self._process is not None
        while self._process.poll() is None:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.05)  # its last words may still be in the socket
        self._die(f"the engine process ended with code {self._process.returncode}")

    def _die(self, reason: str) -> None:
        if self.state == "dead":
            return
        self.state, self.error = "dead", reason
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.wake()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineDead(reason))
