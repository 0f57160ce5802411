"""What policies keep, and how they keep it between runs.

Owns: the decayed count, the last-use record, and the file a policy saves itself to. No torch.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moestro.errors import ConfigError
from moestro.expert_cache.policy import Floats, Ints

Arrays = dict[str, npt.NDArray[Any]]

_RENORMALISE_AT = 1e100


class LastUse:
    """When each expert was last used, in ticks: one for every layer of every pass."""

    def __init__(self, layers: int, experts: int) -> None:
        self._ticks = np.zeros(layers * experts, np.int64)
        self._rows = tuple(self._ticks.reshape(layers, experts))
        self._tick = 0

    def touch(self, layer: int, experts: Ints) -> None:
        """Used now."""
        self._tick += 1
        self._rows[layer][experts] = self._tick

    def touch_pass(self, keys: Ints) -> None:
        """All used in one pass: a single tick."""
        self._tick += 1
        self._ticks[keys] = self._tick

    def __getitem__(self, keys: Ints) -> Ints:
        return self._ticks[keys]

    def state(self) -> Ints:
        """To be saved: ticks ago, as negative numbers."""
        return self._ticks - self._tick

    def restore(self, saved: Ints) -> None:
        """Continue from `state`: everything saved lies before everything that follows."""
        self._ticks[:] = saved
        self._tick = 0


class DecayedCount:
    """Uses per expert, one a pass at most per touch, fading with a half-life in passes.

    Instead of shrinking every count as time passes, newer uses weigh more (forward decay); the
    weights are brought back to 1 long before they overflow.
    """

    def __init__(self, layers: int, experts: int, half_life: float) -> None:
        if not half_life > 0:
            raise ConfigError(f"half_life is {half_life}; it must be more than 0 passes")
        self._weights = np.zeros(layers * experts, np.float64)
        self._rows = tuple(self._weights.reshape(layers, experts))
        self._growth = 2.0 ** (1.0 / half_life)
        self._clock = 0
        self._unit = 1.0  # weight of a use at `_clock`

    def touch(self, layer: int, experts: Ints, clock: int) -> None:
        """Used in the pass `clock`, which never goes back."""
        if clock != self._clock:
            self._advance(clock)
        self._rows[layer][experts] += self._unit

    def touch_pass(self, keys: Ints, clock: int) -> None:
        """Keys of any layers used in the pass `clock`."""
        if clock != self._clock:
            self._advance(clock)
        self._weights[keys] += self._unit

    def __getitem__(self, keys: Any) -> Any:
        """Faded number of uses, as of the last touch."""
        return self._weights[keys] / self._unit

    def rate(self, keys: Ints) -> Floats:
        """Uses a pass, between 0 and 1 for one touch a pass."""
        rate: Floats = self[keys] * (1.0 - 1.0 / self._growth)
        return rate

    def state(self) -> Floats:
        """To be saved."""
        return self._weights / self._unit

    def restore(self, saved: Floats) -> None:
        """Continue from `state`."""
        self._weights[:] = saved
        self._unit = 1.0
        self._clock = 0

    def _advance(self, clock: int) -> None:
        passes = clock - self._clock
        self._clock = clock
        if passes <= 0:  # a new run counts from 0 again
            return
        factor = min(self._growth ** min(passes, 1000), _RENORMALISE_AT)
        self._unit *= factor
        if self._unit >= _RENORMALISE_AT:
            self._weights /= self._unit
            self._unit = 1.0


def write_state(path: Path, policy: str, shape: tuple[int, int], arrays: Arrays) -> None:
    """Save arrays under the policy's name and the model's [layers, experts], atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            kept: dict[str, Any] = {"policy": np.array(policy), "shape": np.array(shape), **arrays}
            np.savez(file, **kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_state(path: Path, policy: str, shape: tuple[int, int], names: Sequence[str]) -> Arrays:
    """Load what `write_state` wrote; ConfigError unless it is for this policy and model."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"cannot read the expert policy state {path}: {error}") from error
    kind, size = str(found.get("policy", "?")), tuple(np.atleast_1d(found.get("shape", 0)).tolist())
    if (kind, size) != (policy, shape) or not found.keys() >= set(names):
        raise ConfigError(
            f"{path} holds {kind} for (layers, experts) {size}, not {policy} for {shape}"
        )
    return {name: found[name] for name in names}
