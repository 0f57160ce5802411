"""How fast are the sweep, attention and sampling kernels of `moestro.kernels.gpu` on this GPU?

Prints one table. Every time is that of a CUDA graph's replay, so launches from Python cost nothing;
inputs rotate or exceed the L2 cache. `--tune` also runs other tile sizes. Needs a GPU and Triton:

    python -m benchmarks.gpu_sweep_kernels [--tune] [attention experts decode sampling]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

from moestro.kernels.gpu import (
    attention_decode,
    attention_sweep,
    experts_sweep,
    grouping,
    sampling,
)

BF16 = torch.bfloat16
PAGE = 16
HEADS, KV_HEADS, DIM = 32, 4, 128
SCALE = DIM**-0.5
VOCAB = 151936
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def ms(work: Callable[[], object], repeats: int = 10) -> float:
    """Milliseconds of one call of `work`, which is captured in a graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def row(name: str, measure: Callable[[], tuple[float, float]], unit: str) -> None:
    """Print one line; `measure` gives milliseconds and a rate in `unit`."""
    try:
        time, rate = measure()
        print(f"| {name:<66} | {time * 1e3:>10.1f} us | {rate:>8.1f} {unit:<8} |", flush=True)
    except Exception as error:  # a backend or a tile that does not fit this GPU
        print(f"| {name:<66} | {type(error).__name__}: {str(error)[:60]!r} |", flush=True)


def timed(work: Callable[[], object], amount: float, calls: int = 1) -> tuple[float, float]:
    """Milliseconds of a call, and amount / 1e12 a second (TFLOP/s)."""
    time = ms(work) / calls
    return time, amount / time / 1e9


def attention(tune: bool) -> None:
    """Sweep attention against torch's."""
    shapes = [(8192, 0), (2048, 6144)]
    sizes = [(128, 128, 8, 5), (128, 128, 8, 3), (128, 64, 8, 5), (128, 64, 8, 4), (64, 64, 4, 5)]
    tiles = [attention_sweep.Tile(*size) for size in sizes] if tune else []
    for rows, start in shapes:
        _attention_shape(rows, start, tiles)


def _attention_shape(rows: int, start: int, tiles: list[attention_sweep.Tile]) -> None:
    end = start + rows
    flops = 4.0 * HEADS * DIM * (rows * start + rows * (rows + 1) / 2)
    pool = torch.randn(end // PAGE, 1, PAGE, 2, KV_HEADS, DIM, device="cuda", dtype=BF16)
    table = torch.randperm(end // PAGE, device="cuda").int()
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=BF16)
    out = torch.empty(rows, HEADS * DIM, device="cuda", dtype=BF16)
    kv = pool[table.long(), 0].view(end, 2, KV_HEADS, DIM)
    keys, values = (kv[:, i].transpose(0, 1)[None].contiguous() for i in range(2))
    mask = bias.causal_lower_right(rows, end) if start else None
    wide = q.transpose(0, 1)[None]

    def torchs() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            wide, keys, values, mask, is_causal=mask is None, scale=SCALE, enable_gqa=True
        )

    name = f"T={rows} from {start}"
    for tile in [None, *tiles]:

        def ours(tile: attention_sweep.Tile | None = tile) -> torch.Tensor:
            return attention_sweep.sweep_attention(
                q, pool, 0, table, start, SCALE, None, out=out, tile=tile
            )

        shown = "sweep_attention" if tile is None else f"  {tile}"
        row(f"{shown} {name}", lambda work=ours: timed(work, flops), "TFLOP/s")
    row(f"torch SDPA {name}", lambda: timed(torchs, flops), "TFLOP/s")
    for backend, kind in BACKENDS.items():

        def one(kind: SDPBackend = kind) -> torch.Tensor:
            with sdpa_kernel(kind):
                return torchs()

        row(f"torch SDPA, {backend} {name}", lambda work=one: timed(work, flops), "TFLOP/s")


@dataclass(frozen=True, slots=True)
class Layer:
    """Shape of a layer's experts."""

    name: str
    experts: int
    k: int
    hidden: int
    inter: int


QWEN = Layer("E=128 K=8 H=2048 I=768", 128, 8, 2048, 768)
MIXTRAL = Layer("E=8 K=2 H=4096 I=14336", 8, 2, 4096, 14336)
UP_SIZES = [(128, 64, 8, 4, 1), (128, 64, 8, 3, 1), (64, 64, 8, 3, 2), (64, 64, 4, 3, 2)]
DOWN_SIZES = [(256, 64, 8, 4, 1), (256, 64, 8, 3, 1), (128, 64, 4, 3, 2), (128, 64, 8, 4, 1)]


def experts(tune: bool) -> None:
    """Grouped products of a sweep."""
    for layer, tokens in [(QWEN, 256), (QWEN, 2048), (QWEN, 8192), (MIXTRAL, 8192)]:
        Experts(layer, tokens).report(tune and tokens == 8192)
        torch.cuda.empty_cache()


class Experts:
    """One layer's slab, and the routes of one sweep."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        self.layer, self.tokens, self.routes = layer, tokens, tokens * layer.k
        hidden, inter = layer.hidden, layer.inter
        self.down_offset = 2 * inter * hidden * 2
        weights = torch.empty(layer.experts, 3 * inter * hidden, device="cuda", dtype=BF16)
        self.slab = weights.normal_(std=0.02).view(torch.uint8)
        self.x = torch.randn(tokens, hidden, device="cuda", dtype=BF16)
        self.y = torch.empty(self.routes, inter, device="cuda", dtype=BF16)
        self.z = torch.empty(self.routes, hidden, device="cuda", dtype=BF16)
        choice = torch.rand(tokens, layer.experts, device="cuda").topk(layer.k).indices
        self.ids = choice.int().contiguous()
        self.sorted = grouping.Routes.empty(self.routes, layer.experts, "cuda")
        grouping.sort_routes(self.ids, layer.experts, out=self.sorted)
        self.height = experts_sweep.tile_rows(self.routes, layer.experts, BF16)

    def report(self, tune: bool) -> None:
        """Print this shape's lines."""
        layer, name = self.layer, f"T={self.tokens} {self.layer.name}"
        sort = partial(grouping.sort_routes, self.ids, layer.experts, out=self.sorted)
        row(f"sort_routes {name}", lambda: (ms(sort), self.routes / 1e3), "k routes")
        everyone = list(range(layer.experts))
        for size in sorted({layer.experts, min(8, layer.experts)}, reverse=True):
            groups = [everyone[lo : lo + size] for lo in range(0, layer.experts, size)]
            self._line(f"sweep_up {name}, groups of {size}", groups, up=True)
            self._line(f"sweep_down {name}, groups of {size}", groups, up=False)
        if not tune:
            return
        for sizes, up in ((UP_SIZES, True), (DOWN_SIZES, False)):
            for numbers in sizes:
                shape = experts_sweep.Shape(*numbers)
                self._line(f"  {'up' if up else 'down'} {numbers}", [everyone], up, shape)

    def _line(
        self,
        name: str,
        groups: list[list[int]],
        up: bool,
        shape: experts_sweep.Shape | None = None,
    ) -> None:
        flops = 2.0 * self.routes * self.layer.hidden * self.layer.inter * (2 if up else 1)
        plans = [self._plan(group) for group in groups]

        def work() -> None:
            order = self.sorted.order
            for plan in plans:
                if up:
                    experts_sweep.sweep_up(
                        self.x, order, plan, self.slab, self.layer.k, y=self.y, shape=shape
                    )
                else:
                    experts_sweep.sweep_down(
                        self.y, order, plan, self.slab, self.down_offset, z=self.z, shape=shape
                    )

        row(name, lambda: timed(work, flops), "TFLOP/s")

    def _plan(self, group: list[int]) -> experts_sweep.Tiles:
        tiles = experts_sweep.Tiles.empty(self.routes, len(group), self.height, "cuda")
        numbers = torch.tensor(group, dtype=torch.int32, device="cuda")
        return experts_sweep.plan_tiles(self.sorted.offsets, numbers, numbers, out=tiles)


def decode(tune: bool) -> None:
    """Decode attention, layer after layer so that no KV is in the cache yet."""
    sizes = [(64, 4, 5), (64, 4, 3), (128, 4, 5), (32, 4, 5), (64, 8, 5)] if tune else []
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for rows in (1, 8, 64):
        for length in (300, 8192):
            splits = attention_decode.choose_splits(rows, KV_HEADS, processors)
            _decode_line(rows, length, splits, None)
            for size in sizes:
                _decode_line(rows, length, splits, attention_decode.Tile(*size))
            for other in (splits // 2, splits // 4, splits * 2) if tune else ():
                if 1 <= other <= attention_decode.MOST_SPLITS:
                    _decode_line(rows, length, other, None)


def _decode_line(rows: int, length: int, splits: int, tile: attention_decode.Tile | None) -> None:
    pages = -(-length // PAGE)
    nbytes = rows * length * 2 * KV_HEADS * DIM * 2
    layers = max(1, min(64, 2**28 // nbytes))
    shape = rows * pages, layers, PAGE, 2, KV_HEADS, DIM
    pool = torch.empty(shape, device="cuda", dtype=BF16).normal_()
    tables = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=BF16)
    out = torch.empty(rows, HEADS * DIM, device="cuda", dtype=BF16)
    floats = attention_decode.scratch_floats(rows, HEADS, DIM, splits)
    scratch = torch.empty(floats, device="cuda")

    def work() -> None:
        for layer in range(layers):
            attention_decode.decode_attention(
                q, pool, layer, tables, lengths, SCALE, None,
                out=out, scratch=scratch, splits=splits, tile=tile,
            )  # fmt: skip

    def measure() -> tuple[float, float]:
        time, tera = timed(work, nbytes, layers)
        return time, tera * 1e3

    shown = "decode_attention" if tile is None else f"  {tile}"
    row(f"{shown} B={rows} length={length} splits={splits}", measure, "GB/s")


KINDS = {  # temperature, top_k, top_p, min_p; what the host knows of them
    "greedy": ((0.0, 0, 1.0, 0.0), 0),
    "temperature": ((1.0, 0, 1.0, 0.0), 0),
    "min_p": ((1.0, 0, 1.0, 0.05), 0),
    "top_k 20, top_p 0.95": ((0.6, 20, 0.95, 0.0), 20),
    "top_p 0.95 by sorting": ((0.6, 0, 0.95, 0.0), None),
}


def sample(tune: bool) -> None:
    """Sampling of whole batches."""
    for batch in (1, 16, 64):
        _sample_batch(batch)


def _sample_batch(batch: int) -> None:
    logits = torch.randn(batch, VOCAB, device="cuda") * 3
    scratch = sampling.Scratch.empty(batch, VOCAB, "cuda")
    tokens = torch.empty(batch, dtype=torch.int64, device="cuda")
    finite = torch.empty(batch, dtype=torch.bool, device="cuda")

    def line(name: str, work: Callable[[], object]) -> None:
        row(f"{name} B={batch}", lambda: (ms(work), batch), "rows")

    def draw(rows: sampling.Rows, top: int | None) -> None:
        sampling.sample(logits, rows, top, scratch=scratch, tokens=tokens, finite=finite)

    for name, (numbers, top) in KINDS.items():
        line(f"sample {name}", partial(draw, _rows(batch, *numbers), top))
    line("torch argmax", partial(torch.argmax, logits, -1))
    line("logprobs n=5", partial(sampling.logprobs, logits, tokens, 5))


def _rows(batch: int, heat: float, top_k: int, top_p: float, min_p: float) -> sampling.Rows:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    return sampling.Rows(
        column(heat, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float64),
        column(min_p, torch.float64),
        torch.arange(batch, device="cuda"),
        column(0, torch.int64),
    )


PARTS = {"attention": attention, "experts": experts, "decode": decode, "sampling": sample}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--tune", action="store_true", help="other tile sizes too")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in args.parts:
        PARTS[part](args.tune)


if __name__ == "__main__":
    main()
