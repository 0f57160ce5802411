"""What a benchmark finds, as frozen values, and the arithmetic on them.

Owns: percentiles, what a phase moved, and the bound that a decode step is held against. No torch,
no clock. Does not own: how it is measured (`bench`, `bench_batch`, `bench_link`) or shown (the
server's command line).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from moestro.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the engine: `batch` prompts at once, `repeat` times. Lengths in tokens."""

    batch: int
    input_len: int
    output_len: int
    repeat: int = 1
    warmup: int = 1  # batches before the first that counts
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Of one sequence at its end."""
        return self.input_len + self.output_len


@dataclass(frozen=True, slots=True)
class Counts:
    """What the expert cache did in a phase. `hits` are uses served from a slot."""

    hits: int = 0
    misses: int = 0
    from_host: int = 0  # of the misses
    from_disk: int = 0
    staged: int = 0  # misses that were not kept
    host_bytes: int = 0  # moved from host memory towards compute
    disk_bytes: int = 0
    exposed: float = 0.0  # seconds that computing stood still for experts


def counts_between(before: EngineStats, after: EngineStats) -> Counts:
    """What happened between two snapshots."""
    old, new = before.experts, after.experts
    return Counts(
        hits=new.hits - old.hits,
        misses=new.misses - old.misses,
        from_host=new.host.hits - old.host.hits,
        from_disk=new.disk.hits - old.disk.hits,
        staged=new.staged - old.staged,
        host_bytes=new.host.bytes_read - old.host.bytes_read,
        disk_bytes=new.disk.bytes_read - old.disk.bytes_read,
        exposed=new.exposed_seconds - old.exposed_seconds,
    )


@dataclass(frozen=True, slots=True)
class Phase:
    """Prefill or decode of one batch. `steps` are sweeps or decode steps."""

    seconds: float
    tokens: int
    steps: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Run:
    """One batch from its arrival to its end. Times in seconds."""

    prefill: Phase
    decode: Phase
    first: tuple[float, ...]  # to the first token, one for each sequence
    gaps: tuple[float, ...]  # between neighbouring tokens, of all sequences


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of a decode step that misses nothing; `measured` in `steps` of them, else estimated
    as what is left of a step without the time that it stood still."""

    seconds: float
    measured: bool
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second from host memory to the slots, and where the number is from."""

    rate: float
    source: str


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs of one load, with what bounds them."""

    load: Load
    runs: tuple[Run, ...]
    floor: Floor | None  # None when there was no decode step
    link: Link


@dataclass(frozen=True, slots=True)
class Bound:
    """A decode step against floor + bytes / link. Seconds and bytes of the mean step."""

    step: float
    bytes: float
    floor: Floor
    link: Link

    @property
    def seconds(self) -> float:
        """What a step takes at best when nothing of a fetch hides behind computing."""
        return self.floor.seconds + self.bytes / self.link.rate

    @property
    def share(self) -> float:
        """Of the bound reached; above 1 when fetches hid behind computing."""
        return self.seconds / self.step if self.step > 0 else 0.0


def bound(decode: Phase, floor: Floor | None, link: Link) -> Bound | None:
    """The bound of a decode phase; None when it has no step."""
    if floor is None or not decode.steps:
        return None
    moved = decode.counts.host_bytes / decode.steps
    return Bound(decode.seconds / decode.steps, moved, floor, link)


def estimated_floor(decode: Phase) -> Floor | None:
    """The floor when every step missed: the mean step less what it stood still."""
    if not decode.steps:
        return None
    return Floor(max(0.0, decode.seconds - decode.counts.exposed) / decode.steps, False)


def total(phases: Sequence[Phase]) -> Phase:
    """Several phases as one."""
    every = [phase.counts for phase in phases]
    return Phase(
        sum(phase.seconds for phase in phases),
        sum(phase.tokens for phase in phases),
        sum(phase.steps for phase in phases),
        Counts(*(sum(getattr(one, name) for one in every) for name in Counts.__slots__)),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies, between neighbours in proportion; 0 without any."""
    ranked = sorted(values)
    if not ranked:
        return 0.0
    at = share * (len(ranked) - 1)
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (at - low) * (ranked[high] - ranked[low])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, in the values' own unit."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: percentile(values, share) for name, share in shares.items()}
    return {
        "mean": fmean(values) if values else 0.0,
        **found,
        "max": max(values, default=0.0),
        "count": len(values),
    }
