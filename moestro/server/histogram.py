"""Numbers for /metrics. Owns: a histogram that is cheap to add to, and totals that never go back.

Not thread-safe: observations and scrapes both happen on the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
STEP_TOKENS = (1.0, *(float(2**k) for k in range(3, 15)))


def one_two_five(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `limit`."""
    bounds = []
    decade = 1
    while decade <= limit:
        bounds += [float(m * decade) for m in (1, 2, 5) if m * decade <= limit]
        decade *= 10
    return tuple(bounds)


def label(bound: float) -> str:
    """Return a bucket's bound as Prometheus writes it."""
    return "+Inf" if bound == float("inf") else repr(float(bound))


class Histogram:
    """Counts per bucket; `bounds` are inclusive upper ends, ascending."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add `value`, `times` times over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Write the cumulative buckets into a family."""
        add_buckets(family, labels, self.bounds, self.counts, self.total)


def add_buckets(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> None:
    """Write per-bucket counts (one more than bounds: the last is +Inf) as cumulative ones."""
    running = 0
    buckets = []
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        running += count
        buckets.append((label(bound), float(running)))
    family.add_metric(labels, buckets=buckets, sum_value=total)


class Totals:
    """Totals that an engine reports, kept from going back when it starts again from zero."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._base: dict[str, float] = {}
        self._life = 0

    def begin_life(self, number: int) -> None:
        """Say which engine the values are of from now on: a new one has counted from zero."""
        if number != self._life:
            self._life = number
            for name, last in self._last.items():
                self._base[name] = self._base.get(name, 0.0) + last
            self._last.clear()

    def of(self, name: str, value: float) -> float:
        """Return the total over all engine lives, given the present one's."""
        last = self._last.get(name, 0.0)
        if value < last:
            self._base[name] = self._base.get(name, 0.0) + last
        self._last[name] = value
        return self._base.get(name, 0.0) + value
