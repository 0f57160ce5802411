"""How often an engine that died is started again, and after how long.

Owns: that arithmetic. It has no clock: times come in as arguments, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Restarts:
    """At most `most` restarts within `window` seconds, and of engines that never get ready."""

    most: int
    window: float = 600.0
    delays: tuple[float, ...] = (0.0, 1.0, 5.0)  # by how many died in a row before they could serve
    total: int = 0
    _unready: int = 0
    _recent: deque[float] = field(default_factory=deque)

    def next(self, now: float, *, ready: bool) -> float | None:
        """Seconds to wait before the restart that is due now; None when it is one too many.

        `ready`: whether the engine that died could serve.
        """
        self._unready = 0 if ready else self._unready + 1
        while self._recent and now - self._recent[0] >= self.window:
            self._recent.popleft()
        # A load may take longer than the window, so that the window alone would never end it.
        if len(self._recent) >= self.most or self._unready > self.most:
            return None
        self._recent.append(now)
        self.total += 1
        return self.delays[min(self._unready, len(self.delays) - 1)]

    @property
    def used_up(self) -> str:
        """Why there is no further restart, in words."""
        if not self.most:
            return "it is not restarted (--engine-restarts 0)"
        times = "once" if self.most == 1 else f"{self.most} times"
        if self._unready > self.most:
            return f"it was restarted {times} without getting ready"
        return f"it was restarted {times} within {self.window / 60:g} minutes"
