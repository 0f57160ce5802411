"""How long do the GPU's decode kernels take, and how much of the memory's speed do they reach?

Times every kernel in a CUDA graph of many launches over different weights, more than the L2 cache
holds. Sizes are those of Qwen3-30B-A3B unless told otherwise. With --check the results of the
launches are compared with torch; with --tune many shapes of the expert kernels are tried and the
best are shown.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks import report
from moestro.kernels import reference
from moestro.kernels import reference_tables as plain
from moestro.kernels.gpu import acquire, combine, experts, fetch, linear, norm, rotary, router
from moestro.kernels.gpu.experts import Shape
from moestro.kernels.gpu.tables import CacheTables, LayerWork, StepLog

DEVICE = "cuda"
DTYPE = torch.bfloat16
LAUNCHES = 24  # in one graph
SLOTS = 512  # blobs of weights to read from: 4.8 GB at the default sizes
COLD = 256 << 20  # bytes of weights that no cache holds
BATCHES = (1, 4, 8, 16, 64)
Launch = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    hidden: int
    inner: int
    experts: int
    k: int

    @property
    def blob(self) -> int:
        """Bytes of one expert."""
        return 3 * self.hidden * self.inner * DTYPE.itemsize


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    micros: float
    nbytes: float = 0.0  # that must be read and written; 0 when only time matters

    @property
    def speed(self) -> float:
        """GB/s."""
        return self.nbytes / self.micros / 1e3

    def text(self, ceiling: float) -> str:
        """What the table shows, with the share of `ceiling` GB/s."""
        if not self.nbytes:
            return f"{self.micros:9.2f} us"
        return f"{self.micros:9.2f} us {self.speed:7.0f} GB/s {100 * self.speed / ceiling:4.0f} %"


def measure(launches: Sequence[Launch], replays: int = 20) -> float:
    """Microseconds of one launch, in a graph of all of them."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (replays * len(launches))


def copy_speed() -> float:
    """GB/s of a copy within the GPU's memory, bytes read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure([partial(target.copy_, source)] * 4) / 1e3


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers."""
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(0.0, scale)


def routed(sizes: Sizes, batch: int) -> torch.Tensor:
    """ids int32 [batch, k]: every expert as likely."""
    scores = torch.rand(batch, sizes.experts, device=DEVICE)
    return scores.topk(sizes.k).indices.to(torch.int32)


class Experts:
    """A slab of random blobs, and layers that read from ever new places of it."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.weights = random(SLOTS, sizes.blob // DTYPE.itemsize, scale=0.02)
        self.slab = self.weights.view(torch.uint8)
        self.places = itertools.cycle(torch.randperm(SLOTS).tolist())

    def layers(self, batch: int) -> list[Layer]:
        """One layer for each launch of a graph."""
        return [self.layer(batch) for _ in range(LAUNCHES)]

    def layer(self, batch: int) -> Layer:
        """Random routes, and a place for each expert among them."""
        sizes = self.sizes
        ids = routed(sizes, batch)
        flat = ids.view(-1).tolist()
        slots = {expert: next(self.places) for expert in sorted(set(flat))}
        tables = plain.Tables(
            slot_of=[slots.get(e, -1) for e in range(sizes.experts)],
            owner=[-1] * SLOTS, source=[], admit=[], victims=[], ring=0, experts=sizes.experts,
        )  # fmt: skip
        found = plain.acquire(0, flat, tables)
        work = LayerWork.empty(sizes.experts, len(flat), DEVICE)
        groups = len(found.group_slot)
        work.n_groups.fill_(groups)
        work.group_slot[:groups] = torch.tensor(found.group_slot, dtype=torch.int32)
        work.group_lo[: groups + 1] = torch.tensor(found.group_lo, dtype=torch.int32)
        work.order.copy_(torch.tensor(found.order, dtype=torch.int32))
        return Layer(sizes, self, batch, ids, slots, work)


class Layer:
    """One launch's inputs and outputs."""

    def __init__(
        self,
        sizes: Sizes,
        weights: Experts,
        batch: int,
        ids: torch.Tensor,
        slots: dict[int, int],
        work: LayerWork,
    ) -> None:
        self.sizes, self.ids, self.slots, self.work = sizes, ids, slots, work
        self.weights = weights
        self.groups = len(slots)
        self.x = random(batch, sizes.hidden)
        self.y = random(batch * sizes.k, sizes.inner)
        self.z = random(batch * sizes.k, sizes.hidden)

    def up(self, shape: Shape | None = None) -> None:
        """x -> y."""
        experts.expert_up(self.x, self.work, self.weights.slab, self.sizes.k, y=self.y, shape=shape)

    def down(self, shape: Shape | None = None) -> None:
        """y -> z."""
        experts.expert_down(self.y, self.work, self.weights.slab, z=self.z, shape=shape)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that up and down move."""
        third = self.groups * self.sizes.blob // 3
        small = self.x.nbytes + self.y.nbytes, self.y.nbytes + self.z.nbytes
        return 2 * third + small[0], third + small[1]

    def wrong(self) -> float:
        """Largest error of y and z, as a share of their largest value."""
        sizes = self.sizes
        cut = 2 * sizes.inner * sizes.hidden
        found = 0.0
        for route, expert in enumerate(self.ids.view(-1).tolist()):
            blob = self.weights.weights[self.slots[expert]].float()
            wide = blob[:cut].view(-1, sizes.hidden) @ self.x[route // sizes.k].float()
            y = reference.swiglu(wide)
            z = blob[cut:].view(-1, sizes.inner) @ self.y[route].float()
            found = max(found, *(_off(a[route], b) for a, b in ((self.y, y), (self.z, z))))
        return found


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


def expert_rows(weights: Experts, batch: int, errors: dict[str, float]) -> Iterator[Row]:
    """Time up and down; note their error in `errors`."""
    layers = weights.layers(batch)
    ups = measure([layer.up for layer in layers])
    downs = measure([layer.down for layer in layers])
    moved = [sum(layer.nbytes[i] for layer in layers) / len(layers) for i in range(2)]
    groups = sum(layer.groups for layer in layers) / len(layers)
    yield Row(f"expert_up, B={batch} ({groups:.0f} experts)", ups, moved[0])
    yield Row(f"expert_down, B={batch} ({groups:.0f} experts)", downs, moved[1])
    errors[f"experts, B={batch}"] = layers[-1].wrong()


def acquire_rows(sizes: Sizes, batch: int) -> Iterator[Row]:
    """All experts there, and none there and none admitted, so that each goes to the ring."""
    groups = min(sizes.experts, batch * sizes.k)
    for name, slots in (("all hits", sizes.experts), ("all misses", 1)):
        tables = CacheTables.empty(
            1, sizes.experts, slots=slots, ring=groups, victims=1, device=DEVICE
        )
        tables.source.fill_(256)
        tables.admit.zero_()
        if slots > 1:
            tables.slot_of.copy_(torch.arange(slots, dtype=torch.int32))
            tables.owner.copy_(tables.slot_of)
        work = LayerWork.empty(sizes.experts, batch * sizes.k, DEVICE)
        log = StepLog.empty(1, work.groups, DEVICE)
        launches = [
            partial(acquire.acquire, 0, routed(sizes, batch), tables, work=work, log=log)
            for _ in range(LAUNCHES)
        ]
        yield Row(f"acquire, B={batch}, {name}", measure(launches))


def linear_rows(sizes: Sizes, batch: int, errors: dict[str, float]) -> Iterator[Row]:
    """Projections of 32 heads on 4 of 128, and the router: the kernel and the library."""
    hidden = sizes.hidden
    shapes = (("qkv", 5120, hidden), ("out", hidden, 4096), ("router", sizes.experts, hidden))
    for name, n, k in shapes:
        count = max(LAUNCHES, COLD // (n * k * DTYPE.itemsize))
        weights = random(count, n, k, scale=k**-0.5)
        x, out, other = random(batch, k), random(batch, n), random(batch, n)
        moved = weights[0].nbytes + x.nbytes + out.nbytes
        launches = [partial(linear.linear, x, w, out=out) for w in weights]
        yield Row(f"linear {name}, B={batch}", measure(launches), moved)
        mms = [partial(torch.mm, x, w.t(), out=other) for w in weights]
        served = "" if linear.serves(batch, n, k) else " (better)"
        yield Row(f"torch.mm {name}, B={batch}{served}", measure(mms), moved)
        errors[f"linear {name}, B={batch}"] = _off(out, x.float() @ weights[-1].float().t())


def small_rows(sizes: Sizes, batch: int) -> Iterator[Row]:
    """Router, norm, rotary, combine; 32 heads on 4 of 128."""
    h, g, d = 32, 4, 128
    x, residual, out = (random(batch, sizes.hidden) for _ in range(3))
    by, head = norm.Norm(random(sizes.hidden), 1e-6), random(d)
    logits = random(batch, sizes.experts)
    real = torch.tensor([batch], dtype=torch.int32, device=DEVICE)
    weights = torch.full((batch, sizes.k), 0.1, device=DEVICE)
    ids = routed(sizes, batch)
    z = random(batch * sizes.k, sizes.hidden)
    qkv, q = random(batch, (h + 2 * g) * d), random(batch, h, d)
    pool = random(batch // 16 + 1, 1, 16, 2, g, d)
    at = torch.arange(batch, device=DEVICE)
    inverse = 1.0 / 1e6 ** (torch.arange(0, d, 2, device=DEVICE) / d)
    launches: dict[str, tuple[Launch, int]] = {
        "router": (
            partial(router.softmax_topk, logits, real, sizes.k, True, weights=weights, ids=ids),
            logits.nbytes,
        ),
        "norm": (partial(norm.apply_norm, x, by, out=out), 2 * x.nbytes),
        "add_norm": (partial(norm.add_norm, x, residual, by, out=out), 4 * x.nbytes),
        "rotary": (
            partial(
                rotary.qk_norm_rope_write, qkv, at, at, inverse, pool, 0, h, g, d,
                head, head, 1e-6, None, q_out=q,
            ),
            2 * qkv.nbytes,
        ),
        "combine": (
            partial(combine.combine, z, weights, residual, by, out=out),
            z.nbytes + 3 * x.nbytes,
        ),
    }  # fmt: skip
    for name, (launch, moved) in launches.items():
        yield Row(f"{name}, B={batch}", measure([launch] * LAUNCHES), moved if batch > 1000 else 0)


def fetch_rows(
    weights: Experts, programs: Sequence[int], errors: dict[str, float]
) -> Iterator[Row]:
    """The kernel, and the driver's copy, from pinned memory."""
    size, most = weights.sizes.blob, 32
    host = torch.empty(most, size, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    host.view(torch.int64).copy_(torch.arange(host.nbytes // 8).view(most, -1))
    work = LayerWork.empty(max(most, weights.sizes.experts), most, DEVICE)
    log = StepLog.empty(1, work.groups, DEVICE)
    slots = torch.randperm(SLOTS)[:most]
    work.job_slot.copy_(slots.to(torch.int32))
    work.job_src.copy_(torch.tensor([blob.data_ptr() for blob in host]))
    for jobs in (1, 8, 32):
        work.n_jobs.fill_(jobs)
        for n in programs:
            launch = partial(fetch.fetch, 0, work, weights.slab, size, log, programs=n)
            yield Row(f"fetch, {jobs} jobs, {n} programs", measure([launch] * 2, 5), jobs * size)
        errors[f"fetch, {jobs} jobs"] = float(
            any(not torch.equal(weights.slab[slots[i]].cpu(), host[i]) for i in range(jobs))
        )
        copies = [
            partial(weights.slab[int(slots[i])].copy_, host[i], non_blocking=True)
            for i in range(jobs)
        ]
        yield Row(f"driver's copy, {jobs} jobs", jobs * measure(copies, 5), jobs * size)


def candidates(dtype: torch.dtype) -> Iterator[Shape]:
    """Shapes worth trying."""
    for rows, columns, warps in itertools.product((4, 8, 16, 32), (512, 1024, 2048), (4, 8)):
        if 64 <= rows * columns // (32 * warps) <= 512 // dtype.itemsize:
            yield Shape(0, rows, columns, warps)
    for rows, columns, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (3, 4, 6)):
        inside = 3 * rows * columns * dtype.itemsize * (stages - 1)  # both matrices and the rows
        if 16 * 1024 <= inside <= 200 * 1024:
            yield Shape(16, rows, columns, 8 if rows == 128 else 4, stages)


def tune(weights: Experts, batch: int, shown: int = 6) -> Iterator[tuple[str, str]]:
    """The best shapes of up and of down."""
    layers = weights.layers(batch)
    for index, name in enumerate(("up", "down")):
        moved = sum(layer.nbytes[index] for layer in layers) / len(layers)
        found: list[tuple[float, Shape]] = []
        for shape in candidates(DTYPE):
            launches = [partial(getattr(layer, name), shape) for layer in layers]
            try:
                found.append((measure(launches, 5), shape))
            except Exception as error:  # too much shared memory, which only the compiler knows
                print(f"{shape}: {type(error).__name__}", file=sys.stderr)
        for micros, shape in sorted(found, key=lambda pair: pair[0])[:shown]:
            speed = replace(Row(name, micros), nbytes=moved).speed
            yield f"{name}, B={batch}", f"{micros:8.2f} us {speed:6.0f} GB/s  {shape}"


def table(arguments: argparse.Namespace, errors: dict[str, float]) -> Iterator[Row]:
    """Every row, as it is measured."""
    sizes = Sizes(arguments.hidden, arguments.inner, arguments.experts, arguments.k)
    weights = Experts(sizes)
    for batch in arguments.batches:
        yield from expert_rows(weights, batch, errors)
    for batch in arguments.batches:
        yield from linear_rows(sizes, batch, errors)
    for batch in (*arguments.batches, 8192):
        yield from small_rows(sizes, batch)
    for batch in arguments.batches:
        yield from acquire_rows(sizes, batch)
    yield from fetch_rows(weights, arguments.programs, errors)


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--programs", type=int, nargs="+", default=(8, 16, 32))
    parser.add_argument("--check", action="store_true", help="fail when a result is wrong")
    parser.add_argument("--tune", action="store_true", help="only try shapes of the expert kernels")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.tune:
        sizes = Sizes(arguments.hidden, arguments.inner, arguments.experts, arguments.k)
        weights = Experts(sizes)
        for batch in arguments.batches:
            for name, text in tune(weights, batch):
                print(f"{name:<12} {text}", flush=True)
        return 0
    ceiling = copy_speed()
    errors: dict[str, float] = {}
    found: list[Row] = []
    for row in table(arguments, errors):
        found.append(row)
        print(f"{row.name:<36}{row.text(ceiling)}", flush=True)
    bars = [report.Bar(f"error, {name}", value, 0.02) for name, value in errors.items()]
    rows = [("copy within the GPU", f"{ceiling:.0f} GB/s")]
    details = {"rows": [{"name": r.name, "us": r.micros, "GB/s": r.speed} for r in found]}
    return report.finish(arguments, rows, bars if arguments.check else [], details)


if __name__ == "__main__":
    sys.exit(main())
