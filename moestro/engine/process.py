"""The engine process: reads messages, runs turns, writes messages.

Owns: the loop and its end. Started by `engine.handle` with one JSON line on standard input
(socket address, model folder, config); when that pipe closes, the server is gone and so are we.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from moestro.config import Config
from moestro.engine.build import build_engine
from moestro.engine.engine import Engine
from moestro.engine.messages import (
    Abort,
    Add,
    AskStats,
    Events,
    Failed,
    Progress,
    Stats,
    Stop,
    ToEngine,
    ToServer,
    Tune,
    Tuned,
    Tuning,
)
from moestro.errors import MoestroError
from moestro.log import set_level, setup
from moestro.types import Finish, Request, TokenEvent

log = logging.getLogger(__name__)

IDLE_POLL = 500  # milliseconds without a message before looking around
GRAMMAR_POLL = 2  # the same while only a grammar is compiled
FILL_POLL = 2  # the same while experts come to memory
STATS_EVERY = 0.25  # seconds between unasked snapshots while busy
PROGRESS_EVERY = 0.05  # seconds between progress messages


class Outbox:
    """Sends messages to the server; one list a send."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._last_progress = 0.0

    def send(self, *messages: ToServer) -> None:
        """Send now."""
        self._socket.send(self._encoder.encode(messages))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Send a loading report, unless one went out just now."""
        now = time.monotonic()
        if done >= total or now - self._last_progress >= PROGRESS_EVERY:
            self._last_progress = now
            self.send(Progress(stage, done, total))


class Loop:
    """Serves one engine until it is told to stop."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes], outbox: Outbox) -> None:
        self._engine = engine
        self._socket = socket
        self._outbox = outbox
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._stopping = False
        self._last_stats = 0.0

    def run(self) -> None:
        """Until `Stop`."""
        while not self._stopping:
            self._drain(self._patience())
            self._send(self._engine.step(self._message_waits, self._send))
            self._report()

    def _send(self, events: list[TokenEvent]) -> None:
        if events:
            self._outbox.send(Events(tuple(events)))

    def _message_waits(self) -> bool:
        return bool(self._socket.poll(0))

    def _patience(self) -> int:
        """Milliseconds to wait for a message."""
        if not self._engine.idle:
            return GRAMMAR_POLL if self._engine.compiling else 0
        return FILL_POLL if self._engine.filling else IDLE_POLL

    def _drain(self, wait: int) -> None:
        if not self._socket.poll(wait):
            return
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            for message in self._decoder.decode(data):
                self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add(request):
                self._add(request)
            case Abort(id):
                self._engine.abort(id)
            case AskStats(number):
                self._outbox.send(Stats(number, self._engine.stats()))
            case Tune(number, tuning):
                self._tune(number, tuning)
            case Stop():
                self._stopping = True

    def _add(self, request: Request) -> None:
        """What the server should have refused ends that request, not the engine."""
        try:
            self._engine.add(request)
        except MoestroError as error:
            end = TokenEvent(request.id, finish=Finish.ERROR, error=error.message)
            self._outbox.send(Events((end,)))

    def _tune(self, number: int, tuning: Tuning) -> None:
        """Between two turns."""
        try:
            self._engine.tune(tuning)
        except (MoestroError, OSError) as error:
            self._outbox.send(Tuned(number, str(error)))
            return
        set_level(tuning.log_level)
        self._outbox.send(Tuned(number))

    def _report(self) -> None:
        """Unasked snapshots: now and then while busy, and once when all work is done."""
        now = time.monotonic()
        rests = self._engine.idle and not self._engine.filling
        if rests or now - self._last_stats >= STATS_EVERY:
            self._last_stats = now
            self._outbox.send(Stats(0, self._engine.stats()))


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # for the server: it reads its keys again
    start = json.loads(sys.stdin.readline())
    config = Config.from_json(start["config"])
    setup(config.log_level, "engine", form=config.log_format)
    threading.Thread(target=_die_with_server, daemon=True).start()
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(start["address"])
    outbox = Outbox(socket)
    code = _serve(config, Path(start["model"]), socket, outbox)
    socket.close(linger=1000)
    context.term()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is closed; while Python is torn down, libraries would talk of leaks


def _serve(config: Config, model: Path, socket: zmq.Socket[bytes], outbox: Outbox) -> int:
    try:
        engine = build_engine(config, model, outbox.progress)
    except MoestroError as error:
        outbox.send(Failed(type(error).__name__, error.message, error.param))
        return 1
    except MemoryError as error:
        outbox.send(Failed("OutOfMemory", f"the machine ran out of memory while loading: {error}"))
        return 1
    # What exists now stays: the collector need not walk it again, which takes many steps' time.
    gc.collect()
    gc.freeze()
    outbox.send(engine.info, Stats(0, engine.stats()))
    try:
        Loop(engine, socket, outbox).run()
    finally:
        engine.close()
    return 0


def _die_with_server() -> NoReturn:
    while sys.stdin.read(4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
