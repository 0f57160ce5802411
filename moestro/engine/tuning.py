"""What was changed of an engine since its start. Owns: the values that hold, for the next engine
too, and waiting until the present one says that it has taken new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from moestro.config import Config
from moestro.engine.messages import ToEngine, Tune, Tuning
from moestro.errors import EngineDead, InvalidRequest, Unavailable

log = logging.getLogger(__name__)

TUNE_SECONDS = 30.0  # that the engine has to say that a change holds
NOBODY = 0  # number of a change that nobody waits for


class Tunings:
    """Starts with what the configuration says."""

    def __init__(self, config: Config) -> None:
        self._started = Tuning(config.max_num_seqs, config.expert_policy, config.log_level)
        self.now = self._started
        self.max_num_queued = config.max_num_queued
        self._asked: dict[int, asyncio.Future[str | None]] = {}

    def due(self) -> Tune | None:
        """What a new engine must be told first."""
        return None if self.now == self._started else Tune(NOBODY, self.now)

    async def change(
        self, number: int, tuning: Tuning, max_num_queued: int, post: Callable[[ToEngine], None]
    ) -> None:
        """Ask the engine for a change, and wait until it holds.

        Raises Unavailable when the engine does not answer, InvalidRequest with what it has against
        it; nothing has changed then.
        """
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        post(Tune(number, tuning))
        try:
            error = await asyncio.wait_for(future, TUNE_SECONDS)
        except (TimeoutError, EngineDead):
            post(Tune(NOBODY, self.now))  # should it come to the other one yet
            raise Unavailable(
                "The engine did not answer; nothing was changed.", code="engine_busy"
            ) from None
        finally:
            self._asked.pop(number, None)
        if error is not None:
            raise InvalidRequest(error)
        self.now, self.max_num_queued = tuning, max_num_queued

    def answered(self, number: int, error: str | None) -> None:
        """The engine has taken a change, or not."""
        future = self._asked.get(number)
        if future is not None and not future.done():
            future.set_result(error)
        elif error is not None:
            log.error("the engine does not take the settings: %s", error)

    def give_up(self, reason: str) -> None:
        """The engine is gone."""
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineDead(reason))
