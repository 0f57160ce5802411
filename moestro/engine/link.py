"""One engine process and the socket to it, from its start to its end.

Owns: the process, the socket, what is read from it. Each process gets a socket of its own, so
that nothing a dead one has said can be taken for a word of the next. Never loads torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from moestro.config import Config
from moestro.engine.messages import Stop, ToEngine, ToServer

COMMAND = (sys.executable, "-m", "moestro.engine.process")
STOP_SECONDS = 5.0  # between asking the process to stop and killing it
KILL_SECONDS = 10.0  # for a killed process to be gone; one that hangs in the kernel never is
LAST_WORDS = 0.05  # seconds that they may still be in the socket after the process has ended
TICK = 0.05  # seconds between two looks at whether the process lives
AT_ONCE = 0.005  # seconds in which messages are read one after the other while others wait


class Link:
    """Runs `command`, an engine process; `hear` gets each of its messages."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        hear: Callable[[ToServer], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._address = address
        self._hear = hear
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.asyncio.Socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE)
        self._listening: asyncio.Task[None] | None = None
        self._killed: float | None = None  # when, on the monotonic clock

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def start(self, config: Config, model: Path) -> None:
        """Tell the process what to load, and listen to it from now on."""
        line = {"address": self._address, "model": str(model), "config": config.to_json()}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already, as will be noticed
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        self._listening = asyncio.create_task(self._listen())

    def send(self, messages: Sequence[ToEngine]) -> None:
        """Send without waiting: the high-water mark is off, so nobody awaits the future."""
        self._socket.send(self._encoder.encode(messages))

    async def ended(self, look: Callable[[], None]) -> str:
        """Wait for the process's end, calling `look` at each tick; says how it ended."""
        while not self._over:
            await asyncio.sleep(TICK)
            look()
        if self.alive:
            return f"the engine process cannot be killed (process {self.pid})"
        await asyncio.sleep(LAST_WORDS)
        return f"the engine process ended with code {self._process.returncode}"

    def kill(self) -> None:
        """End the process at once."""
        self._killed = time.monotonic()
        self._process.kill()

    @property
    def _over(self) -> bool:
        """The process has ended, or was killed and will not end."""
        if self._killed is not None and time.monotonic() - self._killed > KILL_SECONDS:
            return True
        return not self.alive

    async def stop(self) -> None:
        """Ask the process to end, and kill it when it does not."""
        deadline = time.monotonic() + STOP_SECONDS
        if self.alive:
            with contextlib.suppress(zmq.ZMQError, TimeoutError):
                stop = self._encoder.encode([Stop()])
                await asyncio.wait_for(self._socket.send(stop), STOP_SECONDS)
        while self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.alive:
            self.kill()
        await self.close()

    async def close(self) -> None:
        """Free everything, once the process has ended or was killed. Harmless when done before."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._socket.close(linger=0)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        while not self._over:
            await asyncio.sleep(0.02)

    async def _listen(self) -> None:
        """Read what has come in one go, so that a stream that is behind gets all of it at once.

        Receiving does not wait while there is a message: an engine that is faster than this loop
        would leave no time to anybody else.
        """
        decoder = msgspec.msgpack.Decoder(list[ToServer])
        since = time.monotonic()
        while True:
            for message in decoder.decode(await self._socket.recv()):
                self._hear(message)
            if time.monotonic() - since > AT_ONCE:
                await asyncio.sleep(0)
                since = time.monotonic()
