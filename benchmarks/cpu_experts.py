"""How fast does the CPU compute experts from host memory, against torch's products?

Every row of the table is one variant, thread count and number of routes an expert. Experts are
taken from a pool of `--gib` GiB in turn, so that no cache has them. GB/s are weights read over the
time; the job is as bound by memory as its GB/s are near those of `memory`, which only reads. With
`--check` each result is also compared with torch's in float32.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moestro.kernels import cpu_experts
from moestro.kernels import reference as ops
from moestro.kernels.cpu_experts import CpuExperts, CpuShape
from moestro.kernels.mailbox import DONE, EXPERTS, LINE, POSTED, ROUTES, ROWS, Mailbox, MailboxShape
from moestro.pages import mapped

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Bank:
    """Experts in one mapping. Their numbers repeat every few MiB, which no cache can know."""

    shape: CpuShape
    memory: torch.Tensor  # uint8 [experts, bytes of a blob]

    @classmethod
    def make(cls, shape: CpuShape, nbytes: int) -> Bank:
        """As many as fit in `nbytes`, in huge pages."""
        size = shape.dtype.itemsize
        blob = -(-(shape.down_offset + shape.hidden * shape.intermediate * size) // 256) * 256
        count = max(1, nbytes // blob)
        memory = torch.from_numpy(mapped(count * blob, mmap.PAGESIZE)).view(count, blob)
        one = (torch.randn(blob // size) * shape.hidden**-0.5).to(shape.dtype).view(torch.uint8)
        memory[:] = one
        return cls(shape, memory)

    def weights(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [H, 2I] and down [I, H], transposed views."""
        hidden, inner, dtype = self.shape.hidden, self.shape.intermediate, self.shape.dtype
        flat = self.memory[expert].view(dtype)
        start = self.shape.down_offset // dtype.itemsize
        down = flat[start : start + hidden * inner].view(hidden, inner)
        return flat[: 2 * inner * hidden].view(2 * inner, hidden).t(), down.t()

    def turns(self, experts: int) -> Iterator[list[int]]:
        """Numbers of the experts of one job after the other, without end."""
        at = 0
        while True:
            yield [(at + i) % len(self.memory) for i in range(experts)]
            at = (at + experts) % len(self.memory)


Job = Callable[[list[int]], object]


def native_job(bank: Bank, pool: CpuExperts, x: torch.Tensor, z: torch.Tensor, routes: int) -> Job:
    """A direct call."""
    start, blob = bank.memory.data_ptr(), bank.memory.shape[1]

    def job(experts: list[int]) -> None:
        lines = np.arange(routes * len(experts), dtype=np.int32)
        lo = np.arange(0, len(lines) + 1, routes, dtype=np.int32)
        pool.compute([start + e * blob for e in experts], lo, lines, lines, x, z)

    return job


def mailbox_job(bank: Bank, pool: CpuExperts, x: torch.Tensor, routes: int, experts: int) -> Job:
    """The same through a mailbox, with this thread as the device."""
    total = len(x)
    shape = MailboxShape(total, 1, bank.shape.hidden, experts, bank.shape.dtype)
    memory = torch.zeros(shape.nbytes + LINE, dtype=torch.uint8)
    box = Mailbox.over(memory[-memory.data_ptr() % LINE :], shape)
    box.lo[:] = torch.arange(0, total + 1, routes)
    box.route[:] = torch.arange(total)
    box.x.copy_(x)
    box.header[ROWS], box.header[EXPERTS], box.header[ROUTES] = total, experts, total
    pool.attach(box)
    start, blob = bank.memory.data_ptr(), bank.memory.shape[1]
    header, answer, address = box.header.numpy(), box.answer.numpy(), box.address.numpy()

    def job(chosen: list[int]) -> None:
        address[:] = [start + e * blob for e in chosen]
        header[POSTED] = number = header[POSTED] + 1
        while answer[DONE] != number:
            pass

    return job


def torch_job(bank: Bank, x: torch.Tensor, routes: int) -> Job:
    """torch's own products, one expert after the other, in its threads."""

    def job(experts: list[int]) -> torch.Tensor:
        gate_up, down = zip(*(bank.weights(e) for e in experts), strict=True)
        return ops.grouped_experts(x, [routes] * len(experts), gate_up, down)

    return job


def memory_job(bank: Bank) -> Job:
    """Reading the same bytes and nothing else, in torch's threads."""

    def job(experts: list[int]) -> list[torch.Tensor]:
        return [bank.memory[e].view(torch.int64).sum() for e in experts]

    return job


def timed(job: Job, bank: Bank, experts: int, seconds: float) -> tuple[float, float, float]:
    """(GB/s, median and 90th percentile of a job in microseconds)."""
    took: list[float] = []
    turns = bank.turns(experts)
    for _ in range(3):
        job(next(turns))
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(took) < 5:
        chosen = next(turns)
        began = time.perf_counter()
        job(chosen)
        took.append(time.perf_counter() - began)
    took.sort()
    middle, late = took[len(took) // 2], took[len(took) * 9 // 10]
    return experts * bank.shape.nbytes / middle / 1e9, middle * 1e6, late * 1e6


def agree(bank: Bank, pool: CpuExperts, x: torch.Tensor, routes: int, experts: int) -> float:
    """Largest difference from float32 products, over the largest result."""
    z = torch.empty(len(x), bank.shape.hidden, dtype=x.dtype)
    chosen = next(bank.turns(experts))
    native_job(bank, pool, x, z, routes)(chosen)
    gate_up, down = zip(*(bank.weights(e) for e in chosen), strict=True)
    wide = [[w.float() for w in part] for part in (gate_up, down)]
    expected = ops.grouped_experts(x.float(), [routes] * experts, *wide)
    return float((z.float() - expected).abs().max() / expected.abs().max())


def run(arguments: argparse.Namespace) -> bool:
    """Print the table; whether all results were right, where they were checked."""
    dtype = DTYPES[arguments.dtype]
    hidden, inner = arguments.hidden, arguments.intermediate
    offset = -(-2 * inner * hidden * dtype.itemsize // 256) * 256
    shape = CpuShape(hidden, inner, dtype, offset)
    bank = Bank.make(shape, int(arguments.gib * 2**30))
    able = cpu_experts.available(shape)
    print(f"{len(bank.memory)} experts of {shape.nbytes / 1e6:.2f} MB, {arguments.experts} a job")
    print(f"variants that run here: {', '.join(able)}; default {cpu_experts.choose(shape)}")
    print(f"{'':<22}{'threads':>8}{'routes':>8}{'GB/s':>9}{'median us':>11}{'p90 us':>9}")

    def show(name: str, threads: int, routes: int, job: Job, note: str = "") -> None:
        rate, middle, late = timed(job, bank, arguments.experts, arguments.seconds)
        row = f"{name:<22}{threads:>8}{routes:>8}{rate:>9.1f}{middle:>11.0f}{late:>9.0f}{note}"
        print(row, flush=True)

    right = True
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        show("memory", threads, 0, memory_job(bank))
        for routes in arguments.routes:
            x = torch.randn(arguments.experts * routes, hidden).to(dtype)
            z = torch.empty_like(x)
            show("torch", threads, routes, torch_job(bank, x, routes))
            for variant in arguments.variant or able:
                pool = CpuExperts(shape, variant)
                pool.start(threads, cores=arguments.cores)
                note = ""
                if arguments.check:
                    off = agree(bank, pool, x, routes, arguments.experts)
                    right &= off < 0.02
                    note = f"  off by {off:.1e}"
                show(variant, threads, routes, native_job(bank, pool, x, z, routes), note)
                if arguments.mailbox:
                    job = mailbox_job(bank, pool, x, routes, arguments.experts)
                    show(f"{variant}, mailbox", threads, routes, job)
                pool.stop()
    return right


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 1 when a result was wrong."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=8, help="experts of one job (8)")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--routes", type=int, nargs="+", default=[1, 4, 16], help="of each expert")
    parser.add_argument("--threads", type=int, nargs="+", default=[max(1, cores - 2)])
    parser.add_argument("--cores", type=int, nargs="*", default=[], help="pin the threads to these")
    parser.add_argument("--variant", nargs="*", choices=cpu_experts.VARIANTS, help="all that run")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--gib", type=float, default=2.0, help="memory that experts lie in (2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row (1)")
    parser.add_argument("--check", action="store_true", help="compare results with float32")
    parser.add_argument("--mailbox", action="store_true", help="also through a mailbox")
    arguments = parser.parse_args(argv)
    if reason := cpu_experts.missing():
        print(f"no native kernels: {reason}")
        return 1
    return 0 if run(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
