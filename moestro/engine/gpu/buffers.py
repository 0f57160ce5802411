"""What goes to the device before a decode step and what comes back after it.

Owns: the layout of both, each one contiguous piece so that it is one copy. Does not own: what is
in the plan or what the step computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moestro.kernels.gpu.prepare import Lines, Prepared
from moestro.kernels.gpu.sampling import Rows
from moestro.kernels.gpu.tables import StepLog
from moestro.kernels.gpu.transfer import download, upload

NOWHERE = -1

# Lines of the input, one number for each row.
FIELDS = (
    "token",  # its id, when the host knows it
    "source",  # else the row of the last step that sampled it
    "position",
    "place",  # where its KV goes in layer 0 of the pool, or NOWHERE
    "column",  # a block number that is new in its table: where it goes (or the spare column)
    "block",
    "seed",
    "output_index",
    "temperature",  # bits of a float64, as the next two
    "top_p",
    "min_p",
    "top_k",
    "salt",  # of scrambling
    "rows",  # how many rows are real, in the first place of the line
)
LINE = {name: number for number, name in enumerate(FIELDS)}
PREPARED = Lines(
    **{field: LINE[field] for field in Lines.__slots__},
)


class StepInput:
    """Numbers of a step over at most `rows` rows, on the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = torch.zeros(len(FIELDS), rows, dtype=torch.int64, device=device)

    def line(self, name: str, rows: int) -> torch.Tensor:
        """One line of the first `rows` rows, int64."""
        return self.device[LINE[name], :rows]

    def floats(self, name: str, rows: int) -> torch.Tensor:
        """A line of floats, float64."""
        return self.line(name, rows).view(torch.float64)

    def blank(self) -> npt.NDArray[np.int64]:
        """A host copy in which no row is real."""
        host = np.zeros(self.device.shape, np.int64)
        host[[LINE["source"], LINE["place"]]] = NOWHERE
        host[LINE["top_p"]] = np.float64(1.0).view(np.int64)
        return host

    def upload(self, host: npt.NDArray[np.int64]) -> None:
        """Send a filled copy; returns at once."""
        upload(host, self.device)

    def sampling(self, rows: int, prepared: Prepared) -> Rows:
        """Sampling parameters for the kernels."""
        return Rows(
            temperature=prepared.temperature,
            top_k=prepared.top_k,
            top_p=self.floats("top_p", rows),
            min_p=self.floats("min_p", rows),
            seed=self.line("seed", rows),
            position=self.line("output_index", rows),
        )


@dataclass(frozen=True, slots=True)
class Section:
    """One array of a report: bytes lo .. hi."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    lo: int
    hi: int


class Report:
    """What a step tells the host: tokens, and which experts it used and fetched."""

    def __init__(
        self, rows: int, layers: int, top_k: int, groups: int, device: torch.device
    ) -> None:
        self._sections: list[Section] = []
        size = 0
        for name, shape, dtype in (
            ("fault", (2,), torch.int32),
            ("tokens", (rows,), torch.int64),
            ("finite", (rows,), torch.bool),
            ("ids", (layers, rows, top_k), torch.int32),
            ("n_jobs", (layers,), torch.int32),
            ("job_key", (layers, groups), torch.int32),
            ("job_slot", (layers, groups), torch.int32),
            ("n_cpu", (layers,), torch.int32),
            ("started", (layers,), torch.int64),
            ("ended", (layers,), torch.int64),
            ("waiting", (layers,), torch.int64),
            ("answered", (layers,), torch.int64),
            ("spent", (layers,), torch.int32),
        ):
            end = size + math.prod(shape) * dtype.itemsize
            self._sections.append(Section(name, shape, dtype, size, end))
            size = -(-end // 16) * 16
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.on_device = {
            s.name: self._device[s.lo : s.hi].view(s.dtype).view(s.shape) for s in self._sections
        }
        view = self.on_device
        self.log = StepLog(**{field.name: view[field.name] for field in fields(StepLog)})

    def download(self) -> dict[str, npt.NDArray[Any]]:
        """Start the copy to the host; the arrays may be read once the stream has got there."""
        host = download(self._device).numpy()
        return {
            s.name: host[s.lo : s.hi].view(_NUMPY[s.dtype]).reshape(s.shape) for s in self._sections
        }


_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.bool: np.bool_}


def buckets(most: int) -> Sequence[int]:
    """Sizes of batches that graphs are captured for, up to at least `most` rows."""
    sizes = [size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64) if size < most]
    sizes += list(range(96, most, 32))
    return (*sizes, most)
