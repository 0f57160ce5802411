"""An engine process without a model, for the HTTP side alone: it has its tokens ready.

Speaks the real protocol over the real socket. Every turn gives each live sequence one token; a
request's `priority` is the number of turns a second that it asks for, and the largest of all live
ones counts. The first turn waits until as many live as CROWD in the environment says. Tokens are
the letters, over and over, so that a client can count them. When nothing lives any more, one line
is added to the file named by STAMPS in the environment: when each sequence began (as the number of
a turn) and when each turn left, in seconds of the monotonic clock.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from moestro.engine.messages import (
    Abort,
    Add,
    AskStats,
    EngineInfo,
    Events,
    Stats,
    Stop,
    ToEngine,
    Tune,
    Tuned,
)
from moestro.stats import EngineStats, SchedulerStats
from moestro.types import Finish, Request, Timing, TokenEvent, TokenLogprobs

STAMPS, CROWD = "STREAMS_STAMPS", "STREAMS_CROWD"
STATS_EVERY = 0.25  # seconds
IDLE = 200  # milliseconds
LATE = 0.1  # seconds that are made up for when turns came too late
TURNS = 50  # a second, for who asks for none
INFO = EngineInfo(
    max_model_len=65536,
    vocab_size=260,
    kv_tokens=1 << 24,
    block_size=16,
    eos_token_ids=(0,),
    memory={},
    expert_slots=1,
    experts=1,
)


class Scripted:
    """The loop. `letters` are the ids of single letters."""

    def __init__(self, socket: zmq.Socket[bytes], letters: tuple[int, ...]) -> None:
        self._socket = socket
        self._letters = letters
        self._encoder = msgspec.msgpack.Encoder()
        self._live: dict[str, tuple[Request, int]] = {}  # with the number of the first turn
        self._times: list[float] = []  # of the turns since something lived
        self._began: dict[str, int] = {}
        self._stats_at = 0.0
        self._crowd = int(os.environ.get(CROWD, "1"))

    def send(self, *messages: Any) -> None:
        """Send one list."""
        self._socket.send(self._encoder.encode(messages))

    def run(self) -> None:
        """Until `Stop`."""
        decoder = msgspec.msgpack.Decoder(list[ToEngine])
        due = time.monotonic()
        while True:
            while self._socket.poll(self._patience(due)):
                for message in decoder.decode(self._socket.recv()):
                    self._hear(message)
            now = time.monotonic()
            if not self._live:
                self._write_stamps()
                due = now
            elif now >= due and (self._times or len(self._live) >= self._crowd):
                due = max(due + 1 / self._pace(), now - LATE)
                self._turn()
            self._report()

    def _patience(self, due: float) -> float:
        """Milliseconds to wait for a message."""
        if not self._live:
            return IDLE
        return max(0.0 if self._times else 1.0, 1e3 * (due - time.monotonic()))

    def _pace(self) -> float:
        return max(request.priority for request, _ in self._live.values()) or TURNS

    def _hear(self, message: ToEngine) -> None:
        match message:
            case Add(request):
                self._live[request.id] = request, len(self._times)
                self._began[request.id] = len(self._times)
            case Abort(id):
                self._live.pop(id, None)
            case AskStats(number):
                self.send(Stats(number, self._stats()))
            case Tune(number):
                self.send(Tuned(number))
            case Stop():
                sys.exit(0)

    def _turn(self) -> None:
        number = len(self._times)
        events = tuple(self._event(request, number - at) for request, at in self._live.values())
        for event in events:
            if event.finish is not None:
                del self._live[event.id]
        self._times.append(time.monotonic())
        self.send(Events(events))

    def _event(self, request: Request, count: int) -> TokenEvent:
        sampling = request.sampling
        token = self._letters[count % len(self._letters)]
        last = count + 1 >= sampling.max_tokens
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            top = tuple((self._letters[i], -1.0 - i) for i in range(sampling.logprobs))
            logprobs = (TokenLogprobs(token, -0.5, top),)
        if count and not last:
            return TokenEvent(request.id, (token,), logprobs)
        timing = Timing(0.0, 0.001, 0.001 * count, 0.0, 0, 0)
        finish = Finish.LENGTH if last else None
        return TokenEvent(request.id, (token,), logprobs, finish=finish, timing=timing)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._stats_at >= STATS_EVERY:
            self._stats_at = now
            self.send(Stats(0, self._stats()))

    def _stats(self) -> EngineStats:
        live = len(self._live)
        return EngineStats(scheduler=SchedulerStats(running=live, decoding=live))

    def _write_stamps(self) -> None:
        path = os.environ.get(STAMPS)
        if self._times and path:
            with open(path, "a", encoding="ascii") as file:
                file.write(json.dumps({"began": self._began, "times": self._times}) + "\n")
        self._times, self._began = [], {}


def _end_with_server() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


def _letters(model: str) -> tuple[int, ...]:
    with open(f"{model}/tokenizer.json", encoding="utf-8") as file:
        vocabulary = json.load(file)["model"]["vocab"]
    return tuple(vocabulary[letter] for letter in "abcdefghijklmnopqrstuvwxyz")


def main() -> None:
    """Entry point of the process; `engine.link` starts it like the real one."""
    start = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_server, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(start["address"])
    scripted = Scripted(socket, _letters(start["model"]))
    scripted.send(INFO)
    scripted.run()


if __name__ == "__main__":
    main()
