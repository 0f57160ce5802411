"""An engine process without a model: it says token 1, 2, 3, ... and dies or stalls as asked.

Run as `python fake_engine.py FOLDER`. Each life adds one line to FOLDER/lives: the ids it was
given, with the number of tokens they had. What a request makes of the engine stands in its
prompt: (kind, at): before output `at` the engine dies, stalls, or merely goes on. A file
FOLDER/fail ends every later life while it loads, FOLDER/crash by a signal. FOLDER/mute holds the
numbers of the lives that fall silent while they load, FOLDER/slow for how many seconds all others
report progress before they are ready.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

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
    Tune,
    Tuned,
)
from moestro.stats import EngineStats, SchedulerStats
from moestro.types import Finish, Request, TokenEvent

FINE, POISON, SLEEPY, LAST_WORD = range(1, 5)
STEP = 0.004  # seconds
DEADLY = 66  # seats
INFO = EngineInfo(
    max_model_len=4096,
    vocab_size=5000,
    kv_tokens=4096,
    block_size=16,
    eos_token_ids=(0,),
    memory={},
    expert_slots=1,
    experts=1,
)


class Fake:
    """One life."""

    def __init__(self, folder: Path, socket: zmq.Socket[bytes]) -> None:
        self.folder = folder
        self.socket = socket
        self.live: dict[str, tuple[Request, int]] = {}  # with the number of tokens so far
        self.given: list[str] = []

    def send(self, message: object) -> None:
        self.socket.send(msgspec.msgpack.encode([message]))

    def load(self) -> None:
        lives = self.folder / "lives"
        number = lives.read_text().count("\n") if lives.exists() else 0
        self.note("")
        self.send(Progress("weights", 1, 2))
        mute, slow = self.folder / "mute", self.folder / "slow"
        if mute.exists() and str(number) in mute.read_text().split():
            time.sleep(600)
        end = time.monotonic() + (float(slow.read_text()) if slow.exists() else 0)
        while time.monotonic() < end:
            time.sleep(0.05)
            self.send(Progress("experts", 1, 2))
        if number and (self.folder / "fail").exists():
            self.send(Failed("OutOfMemory", "the weights do not fit any more"))
            time.sleep(0.05)
            sys.exit(1)
        if number and (self.folder / "crash").exists():
            os.kill(os.getpid(), signal.SIGSEGV)
        self.send(INFO)

    def note(self, text: str) -> None:
        with (self.folder / "lives").open("a") as file:
            file.write(text if text else "\n")

    def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(list[ToEngine])
        while True:
            while self.socket.poll(0 if self.live else 100):
                for message in decoder.decode(self.socket.recv()):
                    self.hear(message)
            time.sleep(STEP)
            for id in list(self.live):
                self.step(id)

    def hear(self, message: ToEngine) -> None:
        match message:
            case Add(request):
                self.live[request.id] = request, len(request.generated)
                self.note(f"{request.id}:{len(request.generated)} ")
            case Abort(id):
                self.live.pop(id, None)
            case AskStats(number):
                running = SchedulerStats(running=len(self.live))
                self.send(Stats(number, EngineStats(scheduler=running)))
            case Tune(number, tuning):
                self.note(f"seats={tuning.max_num_seqs} ")
                odd = "odd seats" if tuning.max_num_seqs % 2 else None
                if tuning.max_num_seqs == DEADLY:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.send(Tuned(number, odd))
            case Stop():
                sys.exit(0)

    def step(self, id: str) -> None:
        request, count = self.live[id]
        kind, at = request.prompt[:2]
        if count == at and kind == POISON:
            time.sleep(0.05)  # what was said is read
            os.kill(os.getpid(), signal.SIGKILL)
        if count == at and kind == SLEEPY and not (self.folder / "slept").exists():
            (self.folder / "slept").touch()
            time.sleep(600)
        count += 1
        over = count >= request.sampling.max_tokens
        if over and kind == LAST_WORD:  # the end itself is never said
            self.send(Events((TokenEvent(id, (count,)),)))
            time.sleep(0.05)
            os._exit(7)
        finish = Finish.LENGTH if over else None
        self.send(Events((TokenEvent(id, (count,), finish=finish),)))
        self.live[id] = request, count
        if over:
            del self.live[id]


def end_with_server() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


def main() -> None:
    address = json.loads(sys.stdin.readline())["address"]
    threading.Thread(target=end_with_server, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    fake = Fake(Path(sys.argv[1]), socket)
    fake.load()
    fake.run()


if __name__ == "__main__":
    main()
