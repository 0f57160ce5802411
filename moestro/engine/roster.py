"""The requests that live, and which of them a new engine gets, and when.

Owns: the order of arrival and the search for a request that kills engines. Does not own: what is
known of each (`engine.live`).

After a crash all requests are tried again together. When the next crash comes before any token,
those that waited for one are suspects. Suspects are tried one at a time, each when everybody else
has got a token, and the one that an engine dies of then is given up.
"""

from __future__ import annotations

from collections.abc import Iterator

from moestro.engine.live import Live


class Roster:
    """Live requests by id."""

    def __init__(self) -> None:
        self._live: dict[str, Live] = {}  # in order of arrival
        self._holding = False  # some may not have been submitted

    def __len__(self) -> int:
        return len(self._live)

    @property
    def foreground(self) -> int:
        """Those that somebody waits for."""
        return sum(not live.request.background for live in self._live.values())

    def __iter__(self) -> Iterator[Live]:
        return iter(tuple(self._live.values()))

    def get(self, id: str) -> Live | None:
        """The live request of this id."""
        return self._live.get(id)

    def add(self, live: Live) -> None:
        """A new one."""
        self._live[live.request.id] = live
        self._holding = True

    def pop(self, id: str) -> Live | None:
        """It has ended, or its client has left."""
        return self._live.pop(id, None)

    def clear(self) -> None:
        """There will be no engine any more."""
        self._live = {}

    def crashed(self) -> list[Live]:
        """The engine is gone; returns those that are not to be tried again (one at most)."""
        self._holding = True
        return [live for live in self if live.submitted is not None and live.crashed()]

    def due(self) -> list[Live]:
        """Those to submit now, in order of arrival."""
        if not self._holding:
            return []
        held = [live for live in self if live.submitted is None]
        plain = [live for live in held if not live.suspect]
        self._holding = bool(held)
        if plain or not held:
            return plain
        if any(live.waits_for_token for live in self):
            return []
        return held[:1]
