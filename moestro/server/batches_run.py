"""One batch from its first check to its last file. Owns: the order of its statuses, and what is on
disk at each of them, so that a server that was killed goes on where this one stopped.

Does not own: who may see a batch (`batches`), how a request is answered (`batches_line`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.server.batches_input import Input, Line, check_input, read_line
from moestro.server.batches_line import Handler, answer_line, undone
from moestro.server.batches_results import Results
from moestro.server.batches_state import NANO, Batch, LineError
from moestro.server.files_disk import sync_folder
from moestro.server.files_store import FileStore, StoredFile
from moestro.server.service import Service

log = logging.getLogger(__name__)

MOST_WORKERS = 128
SAVE_AGAIN = 5.0  # seconds until a state that could not be written is tried again


@dataclass(frozen=True, slots=True)
class Place:
    """Where batches live and how they are run."""

    folder: Path
    store: FileStore
    service: Service
    handlers: dict[str, Handler]  # by endpoint


class Run:
    """Brings one batch to its end. Cancelling `run` stops it for now, with nothing lost."""

    def __init__(self, batch: Batch, place: Place) -> None:
        self.batch = batch
        self._place = place
        self._stop = asyncio.Event()
        self._saving = asyncio.Lock()
        self._results: Results | None = None

    def cancel(self) -> None:
        """The batch is to end as cancelled: `batch.outcome` says so already."""
        self._stop.set()

    async def run(self) -> None:
        """Go on from wherever the batch is."""
        batch, store = self.batch, self._place.store
        found = await asyncio.to_thread(self._check)
        if found.errors:
            await self.fail(found.errors)
            return
        output, errors = store.path(batch.output_id), store.path(batch.error_id)
        results = await asyncio.to_thread(Results, output, errors)
        results.start()
        self._results = results
        try:
            batch.total = len(found.lines)
            if batch.status == "validating":
                batch.model = min(found.models)
                batch.enter("in_progress", store.now)
                await self.save()
            if batch.outcome is None:
                await self._work(found.lines, results)
            for line in self._left(found.lines, results):
                results.add(undone(line.custom_id, str(batch.outcome)), good=False)
            await results.flush()
        finally:
            self.counted()
            await results.close()
            self._results = None
        await self._publish(results)

    def counted(self) -> None:
        """Bring the batch's counts up to what is durable."""
        if self._results is not None:
            self.batch.completed = self._results.completed
            self.batch.failed = self._results.failed
            self.batch.used = self._results.used

    async def save(self, state: Batch | None = None) -> None:
        """Keep the batch's state (or `state`), however long the disk does not take it."""
        async with self._saving:
            while True:
                try:
                    await asyncio.to_thread((state or self.batch).save, self._place.folder)
                    return
                except OSError as error:
                    log.error("the state of a batch cannot be written: %s", error.strerror or error)
                    await asyncio.sleep(SAVE_AGAIN)

    def _check(self) -> Input:
        service, batch = self._place.service, self.batch
        path = self._place.store.path(batch.input_file_id)
        if batch.status == "validating":
            longest = service.settings.max_request_body
            return check_input(path, batch.endpoint, longest, service.model_name)
        # It was checked by a server that may have had other limits: what is wrong now shows when
        # a line runs.
        return check_input(path, batch.endpoint, sys.maxsize - 1, lambda model: model or "")

    async def _work(self, lines: list[Line], results: Results) -> None:
        """Run what is not done, until all is, the time is up or somebody cancels."""
        batch = self.batch
        left = iter([line for line in lines if line.custom_id not in results.done])
        working = asyncio.create_task(self._workers(left, results))
        stop = asyncio.create_task(self._stop.wait())
        try:
            either: set[asyncio.Task[Any]] = {working, stop}
            seconds = max(0.0, batch.expires_at - self._place.store.now / NANO)
            await asyncio.wait(either, timeout=seconds, return_when="FIRST_COMPLETED")
            if working.done():
                working.result()
        finally:
            working.cancel()
            stop.cancel()
            await asyncio.gather(working, stop, return_exceptions=True)
        await results.flush()
        if batch.outcome is None:
            over = any(True for _ in self._left(lines, results))
            batch.outcome = "expired" if over else "completed"
        if batch.outcome == "completed":
            batch.enter("finalizing", self._place.store.now)
        self.counted()
        await self.save()

    async def _workers(self, left: Iterator[Line], results: Results) -> None:
        count = min(MOST_WORKERS, 2 * self._place.service.background.limit)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._worker(left, results))

    async def _worker(self, left: Iterator[Line], results: Results) -> None:
        place, batch = self._place, self.batch
        path = place.store.path(batch.input_file_id)
        for line in left:
            body = await asyncio.to_thread(read_line, path, line)
            handler = place.handlers[batch.endpoint]
            answer = await answer_line(place.service, handler, batch.endpoint, line.custom_id, body)
            await results.put(answer[0], good=answer[1])
            self.counted()

    @staticmethod
    def _left(lines: list[Line], results: Results) -> Iterator[Line]:
        return (line for line in lines if line.custom_id not in results.done)

    async def _publish(self, results: Results) -> None:
        """Show the files, then the end. Doing it again changes nothing."""
        batch = self.batch
        output, errors = results.sizes
        while True:
            try:
                show = self._show
                batch.has_output = await asyncio.to_thread(show, batch.output_id, output, "output")
                batch.has_errors = await asyncio.to_thread(show, batch.error_id, errors, "error")
                break
            except OSError as error:
                log.error("the files of a batch cannot be written: %s", error.strerror or error)
                await asyncio.sleep(SAVE_AGAIN)
        # Durable before anybody sees it: whoever does may delete the input at once.
        ended = copy.copy(batch)
        ended.enter(str(batch.outcome), self._place.store.now)
        await self.save(ended)
        batch.enter(ended.status, self._place.store.now)

    def _show(self, id: str, size: int, kind: str) -> bool:
        """Make one file known; False when it is empty, and then it is removed."""
        store, batch = self._place.store, self.batch
        if not size:
            store.path(id).unlink(missing_ok=True)
            sync_folder(store.path(id).parent)
            return False
        made = store.now
        lifetime = batch.output_lifetime
        store.add(
            StoredFile(
                id=id,
                owner=batch.owner,
                bytes=size,
                made=made,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                expires_at=None if lifetime is None else made // NANO + lifetime,
            )
        )
        return True

    async def fail(self, errors: list[LineError]) -> None:
        """End the batch as failed; answers that are there stay."""
        batch, store = self.batch, self._place.store
        batch.errors, batch.outcome = errors, "failed"
        output, log_of_errors = store.path(batch.output_id), store.path(batch.error_id)
        results = await asyncio.to_thread(Results, output, log_of_errors)
        await results.close()
        await self._publish(results)
