"""Experts of a sweep: grouped matrix products over thousands of routes.

Owns: the plan of tiles, the two products with SwiGLU between them, and their tile sizes. Does not
own: sorting routes (`kernels.gpu.grouping`), which experts share a call, or where weights are.

A route is token * K + k. The experts of a call, its groups, are those whose weights are in slots
now; each brings a run of `order`. Tiles of all groups form one list, made on the device, which
programs walk with a fixed stride: the host needs to know no count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.gating import SWIGLU, Gating, bias_place, gated, load_bias

FIELDS = 8  # ints of a tile in the plan: slot, first, end, first of its bundle, bundle size
_BUNDLE = 16  # row tiles that share a weight tile while it is in L2
_MULTIPROCESSORS_OF_CPU = 3  # for the interpreter; odd, so that strides are odd


@dataclass(frozen=True, slots=True)
class Shape:
    """Launch parameters of one product for one height of tile.

    `cols` outputs (for up: gates, and as many ups) by `depth` of the sum a step; `per_sm` programs
    stay resident on a multiprocessor.
    """

    cols: int
    depth: int
    warps: int
    stages: int
    per_sm: int


UP = {
    16: Shape(cols=64, depth=128, warps=4, stages=3, per_sm=2),
    32: Shape(cols=64, depth=128, warps=4, stages=3, per_sm=2),
    64: Shape(cols=64, depth=64, warps=4, stages=4, per_sm=2),
    128: Shape(cols=128, depth=64, warps=8, stages=4, per_sm=1),
}
DOWN = {
    16: Shape(cols=128, depth=128, warps=4, stages=3, per_sm=2),
    32: Shape(cols=128, depth=128, warps=4, stages=3, per_sm=2),
    64: Shape(cols=128, depth=64, warps=4, stages=4, per_sm=2),
    128: Shape(cols=256, depth=64, warps=8, stages=4, per_sm=1),
}
_FLOAT32 = Shape(cols=32, depth=32, warps=4, stages=2, per_sm=2)


def tile_rows(routes: int, experts: int, dtype: torch.dtype) -> int:
    """Height of tiles for `routes` spread over `experts` (of the layer, not of one call)."""
    mean = routes / experts
    if dtype == torch.float32:
        return 16 if mean <= 8 else 32
    for rows, most in ((16, 8), (32, 24), (64, 80)):
        if mean <= most:
            return rows
    return 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one call of up and down, as `plan_tiles` leaves them on the device."""

    rows: int  # height of a tile
    table: torch.Tensor  # int32 [capacity, 8]
    count: torch.Tensor  # int32 [1]

    @staticmethod
    def empty(routes: int, groups: int, rows: int, device: torch.device | str) -> Tiles:
        """Buffers for up to `groups` groups with up to `routes` routes in all."""
        capacity = triton.cdiv(routes, rows) + groups
        table = torch.empty(capacity, FIELDS, dtype=torch.int32, device=device)
        return Tiles(rows, table, torch.empty(1, dtype=torch.int32, device=device))


def plan_tiles(
    offsets: torch.Tensor, group_expert: torch.Tensor, group_slot: torch.Tensor, *, out: Tiles
) -> Tiles:
    """List the tiles of n groups: a group has none if its expert has no route.

    offsets int32 [E + 1] from `sort_routes`; group_expert, group_slot int32 [n], experts distinct,
    1 <= n <= E. Returns `out`, whose capacity must suffice (`Tiles.empty`).
    """
    groups = group_expert.numel()
    _plan_kernel[(groups,)](
        offsets,
        group_expert,
        group_slot,
        out.table,
        out.count,
        groups,
        M=out.rows,
        N=triton.next_power_of_2(offsets.numel()),  # not of the groups: one kernel for all
        BUNDLE=_BUNDLE,
        FIELDS=FIELDS,
    )
    return out


def sweep_up(
    x: torch.Tensor,
    order: torch.Tensor,
    tiles: Tiles,
    slab: torch.Tensor,
    k: int,
    *,
    y: torch.Tensor,
    gating: Gating = SWIGLU,
    bias: int | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """y[route] = silu(gate(x[route // k])) * up(x[route // k]) for every route of the tiles.

    x [T, H] float32, bfloat16 or float16; order int32 [T * k]; slab uint8 [slots, nbytes], a slot
    beginning with [gate; up] of [2I, H]; y [T * k, I] of x's dtype, of which the rows of other
    routes stay as they are. Products and activation in float32, rounded once.
    `gating` is what stands for silu(gate) * up; `bias` the byte of a slot at which the biases
    [2I] of gate and up begin, in x's dtype. `shape` overrides the table. Returns `y`.
    """
    hidden, inter = x.shape[1], y.shape[1]
    weights = slab.view(x.dtype)
    shape = shape or _shape(UP, tiles.rows, x.dtype)
    assert x.is_contiguous() and y.is_contiguous() and order.dtype == torch.int32
    _up_kernel[grid(tiles, inter, shape, x.device)](
        x,
        order,
        tiles.table,
        tiles.count,
        weights,
        y,
        weights.stride(0),
        hidden,
        inter,
        ROUTES_PER_TOKEN=k,
        BIAS=bias_place(bias, x.element_size()),
        M=tiles.rows,
        N=shape.cols,
        DEPTH=shape.depth,
        EVEN=hidden % shape.depth == 0,
        FIELDS=FIELDS,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **gating.arguments(),
    )
    return y


def sweep_down(
    y: torch.Tensor,
    order: torch.Tensor,
    tiles: Tiles,
    slab: torch.Tensor,
    down_offset: int,
    *,
    z: torch.Tensor,
    bias: int | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """z[route] = down(y[route]) for every route of the tiles.

    y [T * k, I] float32, bfloat16 or float16; slab uint8 [slots, nbytes] with down of [H, I] at
    byte `down_offset` of a slot; z [T * k, H] of y's dtype or float32, of which the rows of other
    routes stay as they are. Sums in float32. `bias`: the byte of a slot at which the bias [H]
    begins, in y's dtype. `shape` overrides the table. Returns `z`.
    """
    inter, hidden = y.shape[1], z.shape[1]
    weights = slab.view(y.dtype)
    shape = shape or _shape(DOWN, tiles.rows, y.dtype)
    assert y.is_contiguous() and z.is_contiguous() and order.dtype == torch.int32
    _down_kernel[grid(tiles, hidden, shape, y.device)](
        y,
        order,
        tiles.table,
        tiles.count,
        weights,
        z,
        weights.stride(0),
        down_offset // y.element_size(),
        hidden,
        inter,
        BIAS=bias_place(bias, y.element_size()),
        M=tiles.rows,
        N=shape.cols,
        DEPTH=shape.depth,
        EVEN=inter % shape.depth == 0,
        FIELDS=FIELDS,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return z


def _shape(table: dict[int, Shape], rows: int, dtype: torch.dtype) -> Shape:
    return _FLOAT32 if dtype == torch.float32 else table[rows]


def grid(tiles: Tiles, outputs: int, shape: Shape, device: torch.device) -> tuple[int]:
    """Programs that share the work of all tiles with `outputs` columns."""
    processors = _MULTIPROCESSORS_OF_CPU
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    work = tiles.table.shape[0] * triton.cdiv(outputs, shape.cols)
    return (min(work, processors * shape.per_sm),)


@triton.jit(do_not_specialize=["groups"])
def _plan_kernel(
    offsets_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count_ptr: tl.tensor,
    groups: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BUNDLE: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    group = tl.program_id(0)
    other = tl.arange(0, N)
    experts = tl.load(expert_ptr + other, mask=other < group, other=0)
    rows = tl.load(offsets_ptr + experts + 1) - tl.load(offsets_ptr + experts)
    base = tl.sum(tl.where(other < group, (rows + M - 1) // M, 0), 0)
    expert = tl.load(expert_ptr + group)
    slot = tl.load(slot_ptr + group)
    begin = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    mine = (end - begin + M - 1) // M
    for first in range(0, mine, 64):
        tile = first + tl.arange(0, 64)
        bundle = tile // BUNDLE * BUNDLE
        spots = table_ptr + (base + tile) * FIELDS
        real = tile < mine
        tl.store(spots, slot + tl.zeros_like(tile), mask=real)
        tl.store(spots + 1, begin + tile * M, mask=real)
        tl.store(spots + 2, end + tl.zeros_like(tile), mask=real)
        tl.store(spots + 3, base + bundle, mask=real)
        tl.store(spots + 4, tl.minimum(mine - bundle, BUNDLE), mask=real)
    if group == groups - 1:
        tl.store(count_ptr, base + mine)


@triton.jit
def find(
    work: tl.tensor,
    table_ptr: tl.tensor,
    order_ptr: tl.tensor,
    columns: tl.tensor,
    M: tl.constexpr,
    FIELDS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Slot, column tile, routes [M] and which of them are real of one unit of work.

    Units go down the row tiles of a bundle, then to its next column. Every row tile has the same
    number of columns, so a unit's quotient by it is some tile of its own bundle.
    """
    guess = table_ptr + work // columns * FIELDS
    bundle = tl.load(guess + 3)
    size = tl.load(guess + 4)
    within = work - bundle * columns
    tile = table_ptr + (bundle + within % size) * FIELDS
    slot = tl.load(tile).to(tl.int64)
    end = tl.load(tile + 2)
    at = tl.load(tile + 1) + tl.arange(0, M)
    # Rows past the end repeat the last: loads need no mask, and nothing of them is stored.
    routes = tl.load(order_ptr + tl.minimum(at, end - 1))
    return slot, within // size, routes, at < end


@triton.jit
def _up_kernel(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    y_ptr: tl.tensor,
    slot_stride: tl.tensor,
    hidden: tl.tensor,
    inter: tl.tensor,
    ROUTES_PER_TOKEN: tl.constexpr,
    BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    FIELDS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    columns = tl.cdiv(inter, N)
    depth = tl.arange(0, DEPTH)
    for work in range(tl.program_id(0), tl.load(count_ptr) * columns, tl.num_programs(0)):
        slot, column, routes, real = find(work, table_ptr, order_ptr, columns, M, FIELDS)
        col = column * N + tl.arange(0, N)
        weights = weights_ptr + slot * slot_stride
        token = (routes // ROUTES_PER_TOKEN).to(tl.int64)
        rows = x_ptr + token[:, None] * hidden + depth[None, :]
        gates = weights + tl.minimum(col, inter - 1)[:, None] * hidden + depth[None, :]
        ups = gates + inter * hidden
        gate = tl.zeros([M, N], tl.float32)
        up = tl.zeros([M, N], tl.float32)
        for start in range(0, hidden, DEPTH):
            if EVEN:
                a = tl.load(rows + start)
                b = tl.load(gates + start)
                c = tl.load(ups + start)
            else:
                inside = (start + depth < hidden)[None, :]
                a = tl.load(rows + start, mask=inside, other=0.0)
                b = tl.load(gates + start, mask=inside, other=0.0)
                c = tl.load(ups + start, mask=inside, other=0.0)
            gate = tl.dot(a, b.T, gate, input_precision="ieee")
            up = tl.dot(a, c.T, up, input_precision="ieee")
        if BIAS >= 0:
            gate += load_bias(weights + BIAS, col, col < inter)[None, :]
            up += load_bias(weights + BIAS + inter, col, col < inter)[None, :]
        y = gated(gate, up, ALPHA, LIMIT).to(y_ptr.dtype.element_ty)
        spots = y_ptr + routes.to(tl.int64)[:, None] * inter + col[None, :]
        tl.store(spots, y, mask=real[:, None] & (col < inter)[None, :])


@triton.jit
def _down_kernel(
    y_ptr: tl.tensor,
    order_ptr: tl.tensor,
    table_ptr: tl.tensor,
    count_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    z_ptr: tl.tensor,
    slot_stride: tl.tensor,
    down_offset: tl.tensor,
    hidden: tl.tensor,
    inter: tl.tensor,
    BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    columns = tl.cdiv(hidden, N)
    depth = tl.arange(0, DEPTH)
    for work in range(tl.program_id(0), tl.load(count_ptr) * columns, tl.num_programs(0)):
        slot, column, routes, real = find(work, table_ptr, order_ptr, columns, M, FIELDS)
        col = column * N + tl.arange(0, N)
        own = weights_ptr + slot * slot_stride
        weights = own + down_offset
        route = routes.to(tl.int64)[:, None]
        rows = y_ptr + route * inter + depth[None, :]
        downs = weights + tl.minimum(col, hidden - 1)[:, None] * inter + depth[None, :]
        z = tl.zeros([M, N], tl.float32)
        for start in range(0, inter, DEPTH):
            if EVEN:
                a = tl.load(rows + start)
                b = tl.load(downs + start)
            else:
                inside = (start + depth < inter)[None, :]
                a = tl.load(rows + start, mask=inside, other=0.0)
                b = tl.load(downs + start, mask=inside, other=0.0)
            z = tl.dot(a, b.T, z, input_precision="ieee")
        if BIAS >= 0:
            z += load_bias(own + BIAS, col, col < hidden)[None, :]
        spots = z_ptr + route * hidden + col[None, :]
        real_cols = (col < hidden)[None, :]
        tl.store(spots, z.to(z_ptr.dtype.element_ty), mask=real[:, None] & real_cols)
