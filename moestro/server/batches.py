"""All batches of a server. Owns: the list of them, whose they are, and starting again what a
stopped or killed server has left. Does not own: the life of one (`batches_run`), the wire.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moestro.errors import ConfigError, InvalidRequest, NotFound, RateLimited
from moestro.log import about
from moestro.server.batches_line import Handler
from moestro.server.batches_run import Place, Run
from moestro.server.batches_state import NANO, Batch, LineError
from moestro.server.files_disk import make_folder
from moestro.server.files_store import FileStore
from moestro.server.service import Service

log = logging.getLogger(__name__)

TOGETHER = 8  # batches that run beside each other; later ones wait for their turn
MOST_OPEN = 256  # batches that have not ended


class Batches:
    """Batches under the folder of `store`. Use as a context while the server serves."""

    def __init__(self, service: Service, store: FileStore, handlers: Mapping[str, Handler]) -> None:
        """Read what is there. Blocks. Raises ConfigError."""
        self._store = store
        try:
            folder = make_folder(store.root / "batches")
            self._known = {batch.id: batch for batch in map(_read, folder.glob("batch_*.json"))}
        except (OSError, msgspec.DecodeError) as error:
            store.close()
            raise ConfigError(f"--files-dir {store.root}: {error}", param="files_dir") from None
        self._place = Place(folder, store, service, dict(handlers))
        self._runs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(TOGETHER)
        reserved = set()
        for batch in self._unfinished():
            store.pin(batch.input_file_id, batch.id)
            reserved |= {batch.output_id, batch.error_id}
        store.drop_strays(reserved)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What a batch may ask."""
        return tuple(self._place.handlers)

    def get(self, id: str, owner: str) -> Batch:
        """Look a batch up. Raises NotFound, also for what belongs to somebody else."""
        batch = self._known.get(id)
        if batch is None or batch.owner != owner:
            raise NotFound("No such batch.", param="batch_id")
        if batch.id in self._runs:
            self._runs[batch.id].counted()
        return batch

    def batches_of(self, owner: str) -> list[Batch]:
        """All batches of an owner, newest first."""
        found = [self.get(id, owner) for id, batch in self._known.items() if batch.owner == owner]
        return sorted(found, key=lambda batch: (batch.made, batch.id), reverse=True)

    async def create(self, owner: str, window: int, **asked: Any) -> Batch:
        """Start a batch that expires in `window` seconds; `asked` are fields of `Batch`.

        Raises NotFound for a file that is not the owner's, InvalidRequest for one that is no input.
        """
        file = self._store.get(asked["input_file_id"], owner)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"The file's purpose is '{file.purpose}', not 'batch'.", param="input_file_id"
            )
        if len(self._runs) >= MOST_OPEN:
            raise RateLimited(
                f"{MOST_OPEN} batches have not ended; wait for one or cancel one.", retry_after=60
            )
        made = self._store.now
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            made=made,
            output_id=self._store.new_id(),
            error_id=self._store.new_id(),
            expires_at=made // NANO + window,
            **asked,
        )
        self._store.pin(batch.input_file_id, batch.id)
        try:
            await asyncio.to_thread(batch.save, self._place.folder)
        except BaseException:
            self._store.unpin(batch.input_file_id, batch.id)
            raise
        self._known[batch.id] = batch
        self._start(batch)
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Stop a batch. What has been answered stays. Raises InvalidRequest when it has ended."""
        run = self._runs.get(batch.id)
        if batch.outcome == "cancelled" and not batch.ended:
            return
        if run is None or batch.outcome is not None:
            raise InvalidRequest(
                f"A batch with the status '{batch.status}' cannot be cancelled.", param="batch_id"
            )
        batch.outcome = "cancelled"
        batch.enter("cancelling", self._store.now)
        await run.save()
        run.cancel()

    async def __aenter__(self) -> Batches:
        for batch in sorted(self._unfinished(), key=lambda batch: batch.made):
            self._start(batch)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop for now: what has not ended goes on when a server is started again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.close()

    def _unfinished(self) -> list[Batch]:
        return [batch for batch in self._known.values() if not batch.ended]

    def _start(self, batch: Batch) -> None:
        run = self._runs[batch.id] = Run(batch, self._place)
        task = asyncio.create_task(self._run(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, run: Run) -> None:
        batch = run.batch
        try:
            async with self._turns:
                await run.run()
            log.info("%s has ended: %s", batch.id, batch.status)
        except Exception as error:
            # The text of the exception may hold what the user wrote: log where, not what.
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error(
                "unexpected %s: %s has failed",
                type(error).__name__,
                batch.id,
                extra=about(None, trace),
            )
            await run.fail([LineError("internal_error", "The server failed to run the batch.")])
        self._store.unpin(batch.input_file_id, batch.id)
        del self._runs[batch.id]


def _read(path: Path) -> Batch:
    return msgspec.json.decode(path.read_bytes(), type=Batch)
