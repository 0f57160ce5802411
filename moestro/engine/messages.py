"""What the server process and the engine process say to each other, as msgspec structs.

Owns: the wire between the two. Each side sends lists of these, one batch per step at most.
"""

from __future__ import annotations

import msgspec

from moestro.stats import EngineStats
from moestro.types import Request, TokenEvent


class Add(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: run this sequence."""

    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: the client left. Harmless for an id that is not known."""

    id: str


class AskStats(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: send one full `Stats` with this number."""

    number: int


class Tuning(msgspec.Struct, frozen=True):
    """What of an engine can change while it runs."""

    max_num_seqs: int  # at most what its memory was planned for
    expert_policy: str
    log_level: str


class Tune(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: go on with these, all or none. Answered by `Tuned` with this number."""

    number: int
    tuning: Tuning


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Server to engine: end the process."""


class EngineInfo(msgspec.Struct, tag=True, frozen=True):
    """Engine to server, once, when it can serve: the limits that hold and how memory was split."""

    max_model_len: int
    vocab_size: int
    kv_tokens: int  # tokens the KV pool holds; a longer sequence can never run
    block_size: int
    eos_token_ids: tuple[int, ...]
    memory: dict[str, int]  # name -> bytes
    expert_slots: int
    experts: int  # in all layers together
    notes: tuple[str, ...] = ()  # decisions a user should see at start


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Engine to server while loading. `done` of `total` units (bytes) of `stage`."""

    stage: str
    done: int
    total: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: start-up ended here. `kind` is the class name in `moestro.errors`."""

    kind: str
    message: str
    param: str | None = None


class Events(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: what a turn produced, and the light part of the statistics."""

    events: tuple[TokenEvent, ...]


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: a snapshot. `number` is that of `AskStats`, or 0 when unasked."""

    number: int
    stats: EngineStats


class Tuned(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: the `Tune` of this number holds, or `error` says why nothing changed."""

    number: int
    error: str | None = None


ToEngine = Add | Abort | AskStats | Tune | Stop
ToServer = EngineInfo | Progress | Failed | Events | Stats | Tuned
