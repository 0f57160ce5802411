"""Recorded routing: what every step asked of the experts, so that it can be replayed.

Owns: the file. No torch. It holds expert numbers and nothing of prompts, outputs or their ids:
sequences are numbered in order of appearance.

**Format.** A file is a run of frames: a little-endian u32 length, then that many bytes of
MessagePack, an array whose first item is its kind:

    ["header", version, layers, experts, top_k, model, expert_bytes]    first, and again when a
                                                   restarted process appends (numbers start anew)
    ["step", kind, rows, resumed]                  kind is "decode" or "sweep"
    ["route", layer, ids, runs]                    of the step before; ids are u16, little-endian,
                                                   rows x top_k; runs are [sequence, rows] pairs
                                                   that cover the rows in order, or empty
    ["finish", sequence]                           the number is not used again

A sweep that is interrupted by decode steps goes on in a further step with `resumed`. A process
that dies leaves at worst a torn last frame, which readers ignore and appending removes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np

from moestro.errors import ConfigError
from moestro.expert_cache.policy import Ints

VERSION = 1
NO_SEQUENCE = -1

_BUFFER = 256 << 10  # bytes
_LENGTH = 4  # bytes


class Header(msgspec.Struct, tag="header", array_like=True, frozen=True):
    """What was traced. `expert_bytes` is one blob, 0 when unknown."""

    version: int
    layers: int
    experts: int
    top_k: int
    model: str
    expert_bytes: int = 0


class _Step(msgspec.Struct, tag="step", array_like=True, frozen=True):
    kind: Literal["decode", "sweep"]
    rows: int
    resumed: bool


class _Route(msgspec.Struct, tag="route", array_like=True, frozen=True):
    layer: int
    ids: bytes
    runs: list[tuple[int, int]]


class _Finish(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    sequence: int


_Record = Header | _Step | _Route | _Finish


@dataclass(frozen=True, slots=True)
class Route:
    """One layer of a step."""

    layer: int
    ids: Ints  # [rows, top_k]
    sequences: Ints  # [rows], NO_SEQUENCE where unknown


@dataclass(slots=True)
class Step:
    """One pass over the layers, or a part of one when `resumed`."""

    kind: Literal["decode", "sweep"]
    rows: int
    resumed: bool = False
    routes: list[Route] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)  # sequences that ended after this step


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file. Iterate to read its steps; each iteration reads the file again."""

    path: Path
    header: Header

    def __iter__(self) -> Iterator[Step]:
        return _steps(self.path, self.header)


class TraceWriter:
    """Appends to a trace. A file of the same model is continued, any other is refused.

    When the disk fails, recording stops and says so in the log; serving goes on.
    """

    def __init__(
        self,
        path: str | Path,
        layers: int,
        experts: int,
        top_k: int,
        model: str,
        *,
        expert_bytes: int = 0,
    ) -> None:
        if not 0 < experts <= 1 << 16:
            raise ConfigError(f"a trace holds up to 65536 experts a layer, not {experts}")
        header = Header(VERSION, layers, experts, top_k, model, expert_bytes)
        self._path = Path(path)
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers: dict[str, int] = {}  # sequences that have not finished
        self._next = 0
        self._top_k = top_k
        self._file: BinaryIO | None = _open_to_append(self._path, header)
        self._append(header)

    def begin(self, kind: Literal["decode", "sweep"], rows: int, *, resumed: bool = False) -> None:
        """What follows is a pass of `rows` tokens, or the rest of a sweep (`resumed`)."""
        self._append(_Step(kind, rows, resumed))

    def record(
        self, layer: int, ids: Ints, sequences: Sequence[str] = (), row_of: Ints | None = None
    ) -> None:
        """Routing of one layer, ids [rows, top_k]. Row t belongs to `sequences[row_of[t]]`.

        Without `row_of`, sequences are one for each row, or none.
        """
        if ids.ndim != 2 or ids.shape[1] != self._top_k:
            raise ValueError(f"ids of shape {ids.shape}; the trace is of top {self._top_k}")
        if row_of is None:
            sequences, row_of = distinct(sequences)
        numbers = [self._number(sequence) for sequence in sequences]
        runs = [(numbers[row], len(list(rows))) for row, rows in groupby(row_of.tolist())]
        self._append(_Route(layer, ids.astype("<u2").tobytes(), runs))

    def finish(self, sequence: str) -> None:
        """The sequence has ended; its id may be forgotten."""
        number = self._numbers.pop(sequence, None)
        if number is not None:
            self._append(_Finish(number))

    def close(self) -> None:
        """Write what is buffered and close the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._complain(error)

    def _number(self, sequence: str) -> int:
        number = self._numbers.get(sequence)
        if number is None:
            number = self._numbers[sequence] = self._next
            self._next += 1
        return number

    def _append(self, record: _Record) -> None:
        if self._file is None:
            return
        frame = self._encoder.encode(record)
        try:
            self._file.write(len(frame).to_bytes(_LENGTH, "little") + frame)
        except OSError as error:
            self._file = None
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        logging.getLogger(__name__).error("tracing to %s has stopped: %s", self._path, error)


def distinct(sequences: Sequence[str]) -> tuple[list[str], Ints]:
    """From one id for each row to distinct ids and, for each row, the index of its id."""
    index: dict[str, int] = {}
    rows = [index.setdefault(sequence, len(index)) for sequence in sequences]
    return list(index), np.array(rows, np.int64)


def read_trace(path: str | Path) -> Trace:
    """Open a trace; ConfigError when it is none."""
    path = Path(path)
    return Trace(path, _read_header(path))


def _read_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            frame = next(_frames(file), b"")
        header = msgspec.msgpack.decode(frame, type=_Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not a trace: {error}") from error
    if not isinstance(header, Header) or header.version != VERSION:
        raise ConfigError(f"{path} is not a trace of version {VERSION}: {header}")
    return header


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """Whole frames; a torn one ends the file. Leaves the file position after the last whole one."""
    while True:
        start = file.tell()
        size = int.from_bytes(file.read(_LENGTH), "little")
        frame = file.read(size)
        if not size or len(frame) < size:
            file.seek(start)
            return
        yield frame


def _open_to_append(path: Path, header: Header) -> BinaryIO:
    try:
        if path.exists() and path.stat().st_size:
            found = _read_header(path)
            if found != header:
                raise ConfigError(f"{path} is a trace of something else: {found}, not {header}")
            with path.open("r+b") as file:
                deque(_frames(file), maxlen=0)  # to the end of the last whole frame
                file.truncate(file.tell())
        return path.open("ab", buffering=_BUFFER)
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error.strerror}") from error


def _steps(path: Path, header: Header) -> Iterator[Step]:
    decoder = msgspec.msgpack.Decoder(_Record)
    step: Step | None = None
    offset = highest = 0  # sequence numbers of a later process follow those of the earlier
    with path.open("rb") as file:
        for frame in _frames(file):
            try:
                record: Any = decoder.decode(frame)
            except msgspec.MsgspecError as error:
                raise ConfigError(
                    f"{path} is damaged before byte {file.tell()}: {error}"
                ) from error
            if isinstance(record, Header):
                offset = highest
            elif isinstance(record, _Step):
                if step is not None:
                    yield step
                step = Step(record.kind, record.rows, record.resumed)
            elif step is not None and isinstance(record, _Route):
                route = _route(record, header.top_k, offset)
                highest = max(highest, 1 + int(route.sequences.max(initial=NO_SEQUENCE)))
                step.routes.append(route)
            elif step is not None:
                step.finished.append(record.sequence + offset)
    if step is not None:
        yield step


def _route(record: _Route, top_k: int, offset: int) -> Route:
    ids = np.frombuffer(record.ids, "<u2").astype(np.int64).reshape(-1, top_k)
    sequences = np.full(len(ids), NO_SEQUENCE, np.int64)
    at = 0
    for sequence, rows in record.runs:
        sequences[at : at + rows] = sequence + offset
        at += rows
    return Route(record.layer, ids, sequences)
