"""The server's side of the engine: start it, talk to it, and start it again when it dies.

Owns: the state that the server sees, and the order of a restart. Does not own: one process's life
(`engine.link`), what is sent again and to whom (`engine.live`, `engine.roster`), how often
(`engine.restarts`), how silence is measured (`engine.watchdog`). All methods run on the event
loop. Never loads torch.

A new engine gets every live request with its tokens so far as `Request.generated`. What a token
is depends on the tokens before it and on (seed, position) alone, so a stream goes on as if
nothing had happened. An event that had not been read when the engine died is simply lost: the
new engine gives it again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import zmq.asyncio

from moestro import errors
from moestro.config import Config
from moestro.engine.link import COMMAND, Link
from moestro.engine.live import Live
from moestro.engine.messages import (
    Abort,
    Add,
    AskStats,
    EngineInfo,
    Events,
    Failed,
    Progress,
    Stats,
    ToEngine,
    ToServer,
    Tuned,
    Tuning,
)
from moestro.engine.restarts import Restarts
from moestro.engine.roster import Roster
from moestro.engine.stream import Stream
from moestro.engine.tuning import Tunings
from moestro.engine.watchdog import Watchdog
from moestro.errors import EngineDead, InvalidRequest, MoestroError, Unavailable
from moestro.scheduler.limits import Limits, check
from moestro.stats import EngineStats, SchedulerStats
from moestro.types import Finish, Request, TokenEvent

log = logging.getLogger(__name__)

STALL_SECONDS = 30.0  # of silence with requests open, until `stalled` says so
STARTING = ("starting", 0, 1)


class EngineHandle:
    """Keeps an engine process running and gives access to it."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        *,
        restarts: Restarts | None = None,
        command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._model = model_path
        self._budget = restarts or Restarts(config.engine_restarts)
        self._command = command
        self._clock = clock
        self.state = "loading"  # "loading" | "ready" | "restarting" | "dead"
        self.progress = STARTING
        self.error: str | None = None  # why it is dead or restarted
        self.failure: MoestroError | None = None  # why start-up failed
        self.info: EngineInfo | None = None
        self.snapshot = EngineStats()
        self._limits: Limits | None = None
        self._live = Roster()
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}
        self._tunings = Tunings(config)
        self._numbers = itertools.count(1)
        self._watchdog = Watchdog()
        self._died = clock()
        self._outgoing: list[ToEngine] = []
        self._context = zmq.asyncio.Context()
        self._link: Link | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="moestro-")
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._link is None else self._link.pid

    @property
    def restarts(self) -> int:
        """How often the engine was started again."""
        return self._budget.total

    @property
    def stalled(self) -> bool:
        """The engine loads or has requests, and has been silent for long, if not too long."""
        bound = self._patience / 2
        if self.state == "ready":
            bound = min(STALL_SECONDS, bound)
        return self._watchdog.silence(self._clock()) > bound

    @property
    def foreground(self) -> int:
        """Live sequences that somebody waits for."""
        return self._live.foreground

    async def start(self) -> None:
        """Start the process. Returns at once; `state` and `progress` tell how loading goes."""
        self._link = self._connect()
        self._keeper = asyncio.create_task(self._keep(self._link))

    def open(self, requests: Sequence[Request]) -> Stream:
        """Submit sequences, all or none; while the engine is restarted they wait for it.

        Raises what `scheduler.limits.check` raises, Unavailable while loading, EngineDead when the
        engine is gone.
        """
        limits = self._serving_limits()
        most = limits.max_num_seqs + limits.max_num_queued
        if len(requests) > most:
            raise InvalidRequest(
                f"The request asks for {len(requests)} sequences; this server holds {most} at most."
            )
        waiting = self._live.foreground - limits.max_num_seqs
        for number, request in enumerate(requests):
            check(request, limits, waiting + number)
        now = self._clock()
        if not self._live and self.state == "ready":
            self._watchdog.start(now)
        stream = Stream([request.id for request in requests], self.drop, self._death)
        for request in requests:
            self._live.add(Live(request, stream, now))
        self._submit()
        return stream

    def drop(self, id: str) -> None:
        """Abort one sequence."""
        if self._live.pop(id) is not None:
            self._post(Abort(id))
            self._submit()

    async def stats(self, timeout: float) -> EngineStats:
        """A fresh snapshot, or the last one when the engine does not answer within `timeout`."""
        if self.state == "restarting":
            self.snapshot.scheduler.waiting = len(self._live)
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

    async def tune(self, tuning: Tuning, max_num_queued: int) -> None:
        """Change what can change while the engine runs; a new engine gets the same.

        Raises Unavailable when it cannot be told now, InvalidRequest with what it has against it;
        nothing has changed then.
        """
        if self.state != "ready" or self._limits is None:
            raise Unavailable("The engine is not ready; nothing was changed.", code="engine_busy")
        await self._tunings.change(next(self._numbers), tuning, max_num_queued, self._post)
        self._limits = replace(
            self._limits, max_num_seqs=tuning.max_num_seqs, max_num_queued=max_num_queued
        )

    async def aclose(self) -> None:
        """Stop the process and free everything; harmless when done before. Open streams end with
        EngineDead."""
        if self._closed:
            return
        self._closed = True
        self._die("the server is closing")
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._link is not None:
            await self._link.stop()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def _serving_limits(self) -> Limits:
        if self.state == "dead":
            raise EngineDead(self.error or "the engine stopped")
        if self.state == "loading" or self._limits is None:
            raise Unavailable("the model is still loading", code="loading")
        return self._limits

    def _death(self) -> str | None:
        return (self.error or "the engine stopped") if self.state == "dead" else None

    # One engine after the other

    def _connect(self) -> Link:
        address = f"ipc://{self._folder.name}/{self.restarts}.sock"
        link = Link(self._context, address, self._hear, self._command)
        link.start(self._config, self._model)
        self._watchdog.start(self._clock())
        return link

    async def _keep(self, link: Link) -> None:
        """See to it that there is an engine, until it cannot be had any more."""
        while True:
            ended, hung = await self._end_of(link)
            await link.close()
            delay = self._crashed(hung or ended, hung=hung is not None)
            if delay is None:
                return
            await asyncio.sleep(delay)
            try:
                link = self._link = self._connect()
            except OSError as error:
                self._die(f"the engine process cannot be started again: {error}")
                return

    async def _end_of(self, link: Link) -> tuple[str, str | None]:
        """Wait for the engine's end, and bring it about when it hangs; says how, and why."""
        hung: str | None = None

        def look() -> None:
            nonlocal hung
            patience = self._patience
            if self._watchdog.overdue(self._clock(), patience) and hung is None:
                hung = f"the engine process gave no sign of life for {patience:g} s"
                if self.state != "ready":
                    stage, done, total = self.progress
                    hung += f" while it was loading ({stage}: {done} of {total})"
                link.kill()

        return await link.ended(look), hung

    @property
    def _patience(self) -> float:
        """Seconds that the engine may be silent, as things are."""
        if self.state == "dead":
            return math.inf
        if self.state != "ready":
            return self._config.engine_load_timeout
        return self._config.engine_stall_timeout if self._live else math.inf

    def _crashed(self, reason: str, *, hung: bool) -> float | None:
        """The process is gone; seconds until the next one is to start, or None."""
        if self.state == "dead":
            return None
        if self.info is None and not hung:  # what ends the first start would end the next
            self._die(reason)
            return None
        delay = self._budget.next(self._clock(), ready=self.state == "ready")
        if delay is None:
            self._die(f"{reason}, and {self._budget.used_up}")
            return None
        log.error("%s; it is restarted with %d live requests", reason, len(self._live))
        if self.state == "ready":
            self._died = self._clock()
        self.state = "loading" if self.info is None else "restarting"
        self.error, self.progress = reason, STARTING
        self._watchdog.start(self._clock())
        self._outgoing.clear()
        self._give_up_asking(reason)
        for live in self._live.crashed():
            self._end(live, f"{reason} while it worked on this request, and not for the first time")
        self.snapshot = EngineStats(scheduler=SchedulerStats(waiting=len(self._live)))
        return delay

    def _submit(self) -> None:
        """Give the engine what it is due to get."""
        if self.state != "ready":
            return
        assert self._limits is not None
        now = self._clock()
        for live in self._live.due():
            event = live.end(self._limits)
            request = live.submit(now)
            if event is None:
                self._post(Add(request))
            else:
                self._emit(live, event)

    def _die(self, reason: str) -> None:
        if self.state == "dead":
            return
        self.state, self.error = "dead", reason
        streams = {live.stream for live in self._live}
        self._live.clear()
        for stream in streams:
            stream.wake()
        self._give_up_asking(reason)

    def _give_up_asking(self, reason: str) -> None:
        self._tunings.give_up(reason)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineDead(reason))

    # Messages

    def _post(self, message: ToEngine) -> None:
        """Send with everything else that this turn of the event loop posts."""
        if self.state != "ready":
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if messages and self.state == "ready" and self._link is not None:
            self._link.send(messages)

    def _hear(self, message: ToServer) -> None:
        now = self._clock()
        self._watchdog.hear(now)
        match message:
            case Events(events):
                self._deliver(events, now)
            case Stats(number, stats):
                self.snapshot = stats
                if number in self._asked and not self._asked[number].done():
                    self._asked[number].set_result(stats)
            case Tuned(number, error):
                self._tunings.answered(number, error)
            case Progress(stage, done, total):
                self.progress = (stage, done, total)
            case EngineInfo():
                self._ready(message)
            case Failed(kind, text, param):
                failure = getattr(errors, kind, MoestroError)
                self.failure = failure(text, param=param)
                self._die(text)

    def _deliver(self, events: Sequence[TokenEvent], now: float) -> None:
        for event in events:
            live = self._live.get(event.id)
            if live is not None:
                self._emit(live, live.take(event, now))
        self._submit()  # a token may clear a suspect, and the next one's turn come

    def _emit(self, live: Live, event: TokenEvent) -> None:
        if event.finish is not None:
            self._live.pop(event.id)
        live.stream.push(event)

    def _end(self, live: Live, error: str) -> None:
        self._emit(live, TokenEvent(live.request.id, finish=Finish.ERROR, error=error))

    def _ready(self, info: EngineInfo) -> None:
        self.info = info
        self._limits = Limits(
            max_model_len=info.max_model_len,
            max_num_seqs=self._tunings.now.max_num_seqs,
            max_num_queued=self._tunings.max_num_queued,
            vocab_size=info.vocab_size,
            kv_tokens=info.kv_tokens,
            max_sweep_tokens=self._config.max_sweep_tokens,
        )
        if self.state == "restarting":
            took = self._clock() - self._died
            log.warning("the engine serves again after %.1f s", took)
        self.state, self.error = "ready", None
        tune = self._tunings.due()
        if tune is not None:
            self._post(tune)
        self._submit()
