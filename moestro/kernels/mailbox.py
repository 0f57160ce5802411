"""What a device and the host's expert worker tell each other through page-locked memory.

Owns: where each field lies, and views of them. Does not own: the memory (whoever locks it), who
waits for what on the device, or the work (`kernels.cpu_experts`).

One job at a time. The device writes the job, then its number to `posted`, with release at system
scope; the worker writes z, then the same number to `done`, with release. A number is any int32
other than the last one; the worker serves the newest it sees. A waiter that gave up just posts
another job, and no z of the one before is written once that job's turn has come.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

LINE = 64  # bytes; every field starts on such a boundary

# Indexes into `header`, written by the device.
POSTED, LAYER, ROWS, EXPERTS, ROUTES = range(5)
# Indexes into `answer`, written by the worker.
DONE, ERROR, SPENT = range(3)  # SPENT: nanoseconds that this job took
# Indexes into `stats`, written by the worker: nanoseconds at work, bytes of weights read, jobs
# served, and the monotonic clock in nanoseconds when the worker last looked for a job.
BUSY_NS, BYTES, JOBS, BEAT = range(4)

# What `answer[ERROR]` means. A refused job has no z; its number is written to `done` all the same.
ERRORS = {
    1: "rows is negative or more than max_rows",
    2: "n_experts is negative or more than max_experts",
    3: "n_routes is negative, or more than rows * top_k",
    4: "lo does not go from 0 up to n_routes",
    5: "a route is not one of rows * top_k",
    6: "an expert's address is outside the registered memory",
}


@dataclass(frozen=True, slots=True)
class MailboxShape:
    """Limits of a job. `dtype` is that of x and z."""

    max_rows: int
    top_k: int
    hidden: int
    max_experts: int
    dtype: torch.dtype

    @property
    def max_routes(self) -> int:
        """Token-expert pairs of the largest job."""
        return self.max_rows * self.top_k

    def offsets(self) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
        """name -> (offset in bytes, dtype, shape) of every field, in order."""
        wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "header": (torch.int32, (16,)),
            "answer": (torch.int32, (16,)),
            "stats": (torch.int64, (8,)),
            "address": (torch.int64, (self.max_experts,)),
            "lo": (torch.int32, (self.max_experts + 1,)),
            "route": (torch.int32, (self.max_routes,)),
            "x": (self.dtype, (self.max_rows, self.hidden)),
            "z": (self.dtype, (self.max_routes, self.hidden)),
        }
        out, at = {}, 0
        for name, (dtype, shape) in wanted.items():
            out[name] = at, dtype, shape
            at += -(-torch.Size(shape).numel() * dtype.itemsize // LINE) * LINE
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the whole mailbox, a multiple of LINE."""
        offset, dtype, shape = self.offsets()["z"]
        return offset + -(-torch.Size(shape).numel() * dtype.itemsize // LINE) * LINE


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Views of one mailbox. A route is row * top_k + k, and the index of its line in z."""

    shape: MailboxShape
    buffer: torch.Tensor  # uint8, at least shape.nbytes, kept alive by this object
    header: torch.Tensor  # int32 [16]: posted, layer, rows, n_experts, n_routes
    answer: torch.Tensor  # int32 [16]: done, error, spent
    stats: torch.Tensor  # int64 [8]: busy_ns, bytes, jobs, beat
    address: torch.Tensor  # int64 [max_experts], of each blob in host memory
    lo: torch.Tensor  # int32 [max_experts + 1], range of each expert in `route`
    route: torch.Tensor  # int32 [max_routes]
    x: torch.Tensor  # [max_rows, hidden]
    z: torch.Tensor  # [max_routes, hidden]

    @classmethod
    def over(cls, buffer: torch.Tensor, shape: MailboxShape) -> Mailbox:
        """A mailbox in `buffer`, a flat uint8 tensor on the host whose address is a multiple of
        LINE. Zeroes everything but x and z."""
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device.type != "cpu":
            raise ValueError("a mailbox lies in a flat uint8 tensor in host memory")
        if buffer.numel() < shape.nbytes or buffer.data_ptr() % LINE:
            raise ValueError(
                f"a mailbox takes {shape.nbytes} bytes from a multiple of {LINE} on; "
                f"got {buffer.numel()} bytes at {buffer.data_ptr():#x}"
            )
        views = {}
        for name, (offset, dtype, size) in shape.offsets().items():
            flat = buffer[offset : offset + torch.Size(size).numel() * dtype.itemsize]
            views[name] = flat.view(dtype).view(size)
        buffer[: shape.offsets()["x"][0]].zero_()
        assert set(views) < {field.name for field in fields(cls)}
        return cls(shape, buffer, **views)
