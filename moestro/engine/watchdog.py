"""How long an engine may be silent before it counts as hung.

Owns: that arithmetic. It has no clock: times come in as arguments, in seconds. Does not own: which
bound holds when, or what is done about it (`engine.handle`).
"""

from __future__ import annotations

from dataclasses import dataclass

LATE = 1.0  # seconds between two looks: this process stood still itself


@dataclass(slots=True)
class Watchdog:
    """Watches one engine after the other."""

    _heard: float = 0.0
    _looked: float = 0.0

    def start(self, now: float) -> None:
        """A new engine begins, or one that had nothing to do gets work."""
        self._heard = self._looked = now

    def hear(self, now: float) -> None:
        """The engine said something, whatever it was."""
        self._heard = now

    def silence(self, now: float) -> float:
        """Seconds since the engine's last word."""
        return now - self._heard

    def overdue(self, now: float, bound: float) -> bool:
        """Whether it has been silent for more than `bound` seconds; to be called all the time.

        When this process has not looked for a while, what the engine said is not read yet, and
        the silence begins anew.
        """
        if now - self._looked > LATE:
            self._heard = now
        self._looked = now
        return self.silence(now) > bound
