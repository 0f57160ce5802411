"""What a turn of the engine loop is to do, as frozen values.

Owns: the shape of a decision. `scheduler.scheduler` makes them, the engine's executor carries
them out. Positions and lengths are in tokens, `blocks` are block numbers of the KV pool in order
(`kv_cache.prefix.GONE` where one was given back), and `further` are those of further groups of
layers (`kv_cache.groups`).
"""

from __future__ import annotations

from dataclasses import dataclass

from moestro.kv_cache.prefix import GONE
from moestro.types import TokenLogprobs


def _held(*tables: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(block for table in tables for block in table if block != GONE)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One running sequence: feed `token` at `position`, sample output number `output_index`.

    `token` is None while the step that samples it has been launched and not read: it is that
    step's output, and only the device knows it.
    """

    id: str
    token: int | None
    position: int  # of `token`; its KV goes to blocks[position // block_size]
    blocks: tuple[int, ...]
    output_index: int  # outputs sampled before this one: the counter for its random number
    further: tuple[tuple[int, ...], ...] = ()

    @property
    def held(self) -> tuple[int, ...]:
        """All blocks of all groups."""
        return _held(self.blocks, *self.further)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One decode step: every running sequence advances by one token."""

    rows: tuple[DecodeRow, ...]
    number: int = 0  # counts decode steps


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A run of prompt tokens of one sequence, computed at positions start, start + 1, ..."""

    id: str
    tokens: tuple[int, ...]
    start: int  # tokens before it are in the KV cache already
    blocks: tuple[int, ...]
    output_index: int
    samples: bool  # True when this run ends the prompt: sample from its last token
    further: tuple[tuple[int, ...], ...] = ()

    @property
    def held(self) -> tuple[int, ...]:
        """All blocks of all groups."""
        return _held(self.blocks, *self.further)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Prompt runs of one or more sequences that travel up the layers together."""

    number: int
    rows: tuple[SweepRow, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One turn: first forget `released` and `dropped`, then open, then decode, then advance."""

    decode: DecodePlan | None = None
    opened: SweepPlan | None = None
    advance: int | None = None  # number of the open sweep to advance this turn
    budget: float | None = None  # seconds to advance it for; None = until messages arrive
    dropped: tuple[tuple[int, str], ...] = ()  # (sweep number, id): may not write KV again
    released: tuple[str, ...] = ()  # sequences that are gone: forget what is kept for them


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the executor returns for one row that sampled."""

    id: str
    token: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    complete: bool = False  # its grammar has all it asks for: the sequence ends with this token
    error: str | None = None  # e.g. the logits were not finite: this sequence alone ends
