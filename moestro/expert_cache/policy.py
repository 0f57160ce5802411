"""What a replacement policy is: it hears of every use and says what should leave first.

Owns: the interface, and nothing that acts. `residency` asks and decides, `policies` answer.
No torch. A key is `layer * experts + expert`; the clock counts passes over the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]


class Policy(Protocol):
    """One instance serves one model. Every method is deterministic and called by one thread."""

    name: str
    wants_sequences: bool = False  # `observe` and `finish` are called
    wants_gates: bool = False  # `touch` gets gate probabilities
    records: bool = False  # what it learned is saved even where nobody named a file
    steady: bool = False  # keeps the best part of a working set that cannot fit, by itself

    def touch(
        self, layer: int, experts: Ints, counts: Ints, gates: Floats | None, clock: int
    ) -> None:
        """These distinct experts of `layer` are used now, resident or not.

        `counts` are the tokens of each, at least 1. `gates`, when known, is the probability that
        the router gave each one, averaged over all tokens of the step. Costs microseconds.
        """

    def touch_pass(self, keys: Ints, counts: Ints, clock: int) -> None:
        """The same for a whole pass in one call: distinct `keys` of any layers, and the tokens of
        each. On a GPU the host learns of a pass when it is over."""

    def rank(self, keys: Ints, clock: int) -> Ints:
        """The order in which `keys` should leave: indices into it, first leaves first."""

    def admit(self, key: int, victim: int | None, clock: int) -> bool:
        """Whether `key`, just fetched, deserves the slot of `victim` (None: a free slot)."""
        return True

    def admits(self, keys: Ints, victim: int, clock: int) -> Bools:
        """Which of `keys`, if the next pass used and fetched them, would deserve the slot of
        `victim`: `admit` said in advance, for a GPU that cannot ask."""
        return np.ones(len(keys), np.bool_)

    def observe(self, sequences: Sequence[str], layer: int, ids: Ints, row_of: Ints) -> None:
        """Routing of one layer, ids [rows, top_k]; row t is of `sequences[row_of[t]]`."""

    def observe_pass(self, sequences: Sequence[str], ids: Ints) -> None:
        """The same for a whole decode pass, before `touch_pass`: ids [layers, rows, top_k], row t
        of `sequences[t]`."""
        rows = np.arange(len(sequences))
        for layer, routed in enumerate(ids):
            self.observe(sequences, layer, routed, rows)

    def finish(self, sequence: str) -> None:
        """No more rows of this sequence will come. Harmless for one that was never seen."""

    def save(self, path: Path) -> None:
        """Write what was learned to a file, whole or not at all."""

    def load(self, path: Path) -> None:
        """Take what an earlier run saved. ConfigError when the file is not for this model."""
