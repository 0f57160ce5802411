"""The results of a batch, durable as they come. Owns: the output and the error file while the
batch runs, what is in them after a crash, and writing several results at once.

A result is in one of the two files, once: a line counts as done when it is durable, and only lines
that are not done run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import msgspec

from moestro.server.batches_state import Used
from moestro.server.files_disk import LineLog
from moestro.server.wire import dump

log = logging.getLogger(__name__)

RETRY = 5.0  # seconds until a write that failed, such as to a full disk, is tried again


class Results:
    """Both files of one batch. Open it in a thread; the rest runs on the event loop."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Read what is there. Blocks. Raises OSError."""
        self.done: set[str] = set()  # custom ids
        self.completed = 0
        self.failed = 0
        self.used = Used()
        self._output = LineLog(output)
        self._errors = LineLog(errors)
        self._waiting: list[tuple[dict[str, Any], bool]] = []
        self._arrived = asyncio.Event()
        self._written = asyncio.Condition()
        self._closing = False
        for line in self._output.lines():
            self._count(msgspec.json.decode(line), good=True)
        for line in self._errors.lines():
            self._count(msgspec.json.decode(line), good=False)
        self._task: asyncio.Task[None] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the output and of the error file."""
        return self._output.size, self._errors.size

    def start(self) -> None:
        """Begin to write what `put` brings."""
        self._task = asyncio.create_task(self._write())

    def add(self, record: dict[str, Any], *, good: bool) -> None:
        """Add a result, to be written soon."""
        self._waiting.append((record, good))
        self._arrived.set()

    async def put(self, record: dict[str, Any], *, good: bool) -> None:
        """Add a result, and wait until it is durable. A caller that is cancelled has added it."""
        self.add(record, good=good)
        id = record["custom_id"]
        async with self._written:
            await self._written.wait_for(lambda: id in self.done or self._closing)

    async def flush(self) -> None:
        """Wait until everything added is durable."""
        async with self._written:
            await self._written.wait_for(lambda: not self._waiting or self._closing)

    async def close(self) -> None:
        """Write what waits, unless that fails, and close the files. Once only."""
        self._closing = True
        self._arrived.set()
        if self._task is not None:
            await self._task
        self._output.close()
        self._errors.close()

    async def _write(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting and await self._write_waiting():
                pass
            async with self._written:
                self._written.notify_all()
            if self._closing:
                return

    async def _write_waiting(self) -> bool:
        """Write what waits now; False when that failed and there will be no other try."""
        now = list(self._waiting)
        try:
            await self._append(self._output, [pair for pair in now if pair[1]])
            await self._append(self._errors, [pair for pair in now if not pair[1]])
        except OSError as error:
            log.error("results of a batch cannot be written: %s", error.strerror or error)
            if self._closing:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked(), RETRY)
        return True

    async def _stop_asked(self) -> None:
        while not self._closing:
            self._arrived.clear()
            await self._arrived.wait()

    async def _append(self, file: LineLog, pairs: list[tuple[dict[str, Any], bool]]) -> None:
        if not pairs:
            return
        await asyncio.to_thread(file.append, [_line(record) for record, _ in pairs])
        for record, good in pairs:
            self._count(record, good=good)
        self._waiting = [pair for pair in self._waiting if pair[0]["custom_id"] not in self.done]
        async with self._written:
            self._written.notify_all()

    def _count(self, record: dict[str, Any], *, good: bool) -> None:
        self.done.add(record["custom_id"])
        if not good:
            self.failed += 1
            return
        self.completed += 1
        self.used.add(record["response"]["body"].get("usage"))


def _line(record: dict[str, Any]) -> bytes:
    return dump(record).encode("ascii") + b"\n"
