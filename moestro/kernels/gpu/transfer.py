"""Bytes and order between host and device, without waiting.

Owns: copies through page-locked memory and marks in a stream. On the CPU, where Triton's
interpreter runs the kernels for tests, everything has happened by the time a call returns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Start to copy `values` into `target`; the array may be changed at once."""
    source = torch.from_numpy(np.ascontiguousarray(values))
    if target.device.type == "cuda":
        # torch keeps page-locked memory until the copies that read it are over.
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def send(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The same into a new tensor."""
    kind = torch.from_numpy(np.empty(0, values.dtype)).dtype
    target = torch.empty(values.shape, dtype=kind, device=device)
    upload(values, target)
    return target


def download(source: torch.Tensor) -> torch.Tensor:
    """Start to copy to the host; the result may be read once a mark set after this has passed."""
    if source.device.type != "cuda":
        return source.clone()
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    host.copy_(source, non_blocking=True)
    return host


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Stream:
    """A second queue of work beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self.queue = torch.cuda.Stream(device) if device.type == "cuda" else None

    def use(self) -> AbstractContextManager[Any]:
        """Launch into it."""
        return nullcontext() if self.queue is None else torch.cuda.stream(self.queue)


class Mark:
    """A place in a stream of work."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Here, in the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """The host waits until the place has been reached."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: Stream | None = None) -> None:
        """A stream, or else the current one, goes on only after the place has been reached."""
        if self._event is not None:
            queue = None if stream is None else stream.queue
            (queue or torch.cuda.current_stream()).wait_event(self._event)
