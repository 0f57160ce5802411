"""One MoE layer's experts: lease them, compute, add up.

Owns: grouping tokens by expert and the order of summation, which is by ascending expert id
whatever arrived first, so that text does not depend on what happened to be resident. Does not
own: where experts are (`expert_cache`) or the arithmetic (`kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moestro.engine.layers.moe import gating
from moestro.engine.models.activation import Activation, SwiGLU
from moestro.expert_cache.cache import ExpertCache, Lease
from moestro.expert_cache.layout import ExpertLayout
from moestro.kernels import reference as ops
from moestro.kernels.cpu_experts import CpuExperts, CpuShape
from moestro.kernels.registry import serves

Ints = npt.NDArray[np.int64]

# Rows an expert on average, up to which the native kernels are faster than torch's products in
# float32. In 16 bits they are for any number.
NATIVE_ROWS = 24
TILE_ROWS = 1024  # an expert with more tokens than this is computed in several pieces


@dataclass(frozen=True, slots=True)
class Routes:
    """Token-expert pairs sorted by expert. `order` indexes the flattened [T, k] choices."""

    order: Ints  # [T * k]
    counts: Ints  # [E] tokens of each expert
    token: torch.Tensor  # [T * k] row of x
    ids: Ints  # [T, k]


def sort_routes(ids: torch.Tensor, experts: int) -> Routes:
    """Sort the choices ids [T, k] by expert, tokens in order within one."""
    table = ids.numpy()
    flat = table.reshape(-1)
    # numpy sorts 16-bit numbers by radix, many times as fast for a long sweep.
    order = np.argsort(flat.astype(np.uint16), kind="stable")
    counts = np.bincount(flat, minlength=experts)
    return Routes(order, counts, torch.from_numpy(order // table.shape[1]), table)


class ExpertExecutor:
    """Computes routed experts through the expert cache."""

    def __init__(
        self,
        cache: ExpertCache,
        experts: int,
        piece_flops: float,
        activation: Activation | None = None,
    ) -> None:
        """`experts` of a layer; `activation` if it is not the plain one."""
        activation = activation or SwiGLU()
        self._cache = cache
        self._gating = gating(activation)
        # Transposing is a view, but making one costs as much as a small product: done once a slot.
        self._gate_up = [weight.t() for weight in cache.gate_up]
        self._down = [weight.t() for weight in cache.down]
        layout = cache.layout
        self._packed = layout.format is not None
        plain = not self._packed and not layout.has_bias and isinstance(activation, SwiGLU)
        self._native = _native_pool(layout) if plain else None
        self._addresses = np.array([w.data_ptr() for w in cache.gate_up], np.int64)
        self._experts = experts
        self._cost = 6.0 * layout.hidden * layout.intermediate  # FLOPs of one token in one expert
        self._piece = piece_flops
        self.exposed = 0.0  # seconds of compute stood still for experts, since start

    @property
    def wants_sequences(self) -> bool:
        """Whether anybody looks at whose rows they are."""
        return self._cache.wants_ids

    def decode(
        self,
        layer: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        sequences: Sequence[str],
    ) -> torch.Tensor:
        """Sum of weighted experts for x [B, hidden], weights and ids [B, k]. Row i is of
        sequences[i]."""
        routes = sort_routes(ids, self._experts)
        out = torch.zeros_like(x)
        self._add(layer, x, weights, routes, (0, len(routes.order)), routes.counts, out, sequences)
        return out

    def pieces(
        self,
        layer: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        sequences: Sequence[str],
        out: torch.Tensor,
    ) -> Iterator[None]:
        """The same for many rows, added to `out`, a bounded amount of work between yields.

        No lease is open while the caller has control, so decode steps may run in between.
        """
        routes = sort_routes(ids, self._experts)
        yield
        for span, counts in self._spans(routes.counts):
            self._add(layer, x, weights, routes, span, counts, out, sequences)
            yield

    def _spans(self, counts: Ints) -> Iterator[tuple[tuple[int, int], Ints]]:
        """Ranges of sorted routes worth one piece each, with the counts in that range."""
        budget = max(1, int(self._piece / self._cost))
        taken = np.zeros_like(counts)
        lo = hi = 0
        for expert in np.flatnonzero(counts).tolist():
            left = int(counts[expert])
            while left:
                if hi > lo and hi - lo + min(left, TILE_ROWS) > budget:
                    yield (lo, hi), taken
                    taken, lo = np.zeros_like(counts), hi
                rows = min(left, TILE_ROWS)
                taken[expert] += rows
                hi, left = hi + rows, left - rows
        if hi > lo:
            yield (lo, hi), taken

    def _add(
        self,
        layer: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        routes: Routes,
        span: tuple[int, int],
        counts: Ints,
        out: torch.Tensor,
        sequences: Sequence[str],
    ) -> None:
        lo, hi = span
        token, order = routes.token, routes.order
        if hi - lo < len(order):
            token, order = token[lo:hi], order[lo:hi]
        told: dict[str, Any] = {}
        if self._cache.wants_ids and lo == 0:  # once a layer, however many pieces
            told = {"ids": routes.ids, "gates": weights.float().numpy(), "sequences": sequences}
        with self._cache.acquire(layer, counts, whole=routes.counts, **told) as lease:
            result = self._compute(lease, counts, x, token)
        self.exposed += lease.exposed
        share = weights.reshape(-1).index_select(0, torch.from_numpy(order))
        out.index_add_(0, token, (result * share[:, None]).to(out.dtype))

    def _compute(
        self, lease: Lease, counts: Ints, x: torch.Tensor, token: torch.Tensor
    ) -> torch.Tensor:
        """Rows x[token], sorted by expert, through their experts, as these become available."""
        wanted = int(np.count_nonzero(counts))
        # Decided for all together, so that no product depends on what happened to be resident.
        few = x.dtype != torch.float32 or len(token) <= NATIVE_ROWS * wanted
        if self._native is not None and few:
            return self._by_address(self._native, lease, counts, x, token)
        rows = x.index_select(0, token)
        compute = self._by_packed if self._packed else self._by_tensor
        result: torch.Tensor | None = None
        ends: list[int] = []
        for group in lease.groups():
            if len(group.experts) == wanted:
                return compute(rows, counts[group.experts].tolist(), group.slots)
            if result is None:
                result, ends = torch.empty_like(rows), np.cumsum(counts).tolist()
            for expert, slot in zip(group.experts, group.slots, strict=True):
                lo, hi = ends[expert] - int(counts[expert]), ends[expert]
                result[lo:hi] = compute(rows[lo:hi], [hi - lo], [slot])
        assert result is not None, "a lease without a group"
        return result

    def _by_tensor(self, rows: torch.Tensor, sizes: list[int], slots: list[int]) -> torch.Tensor:
        gate_up, down = self._gate_up, self._down
        weights = [gate_up[s] for s in slots], [down[s] for s in slots]
        return ops.grouped_experts(rows, sizes, *weights, self._gating, self._biases(slots))

    def _biases(self, slots: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        found = self._cache.biases
        return [found[s] for s in slots] if found else None

    def _by_address(
        self, native: CpuExperts, lease: Lease, counts: Ints, x: torch.Tensor, token: torch.Tensor
    ) -> torch.Tensor:
        source, x = token.numpy().astype(np.int32), x.contiguous()
        target = np.arange(len(source), dtype=np.int32)
        result = x.new_empty(len(source), x.shape[1])
        ends = np.cumsum(counts)
        for group in lease.groups():
            sizes = counts[group.experts]
            mine = target
            if (total := int(sizes.sum())) < len(target):
                spans = [target[ends[e] - counts[e] : ends[e]] for e in group.experts]
                mine = np.concatenate(spans)
            lo = np.zeros(len(sizes) + 1, np.int32)
            np.cumsum(sizes, out=lo[1:])
            assert lo[-1] == total == len(mine)
            native.compute(self._addresses[group.slots], lo, source[mine], mine, x, result)
        return result

    def _by_packed(self, rows: torch.Tensor, sizes: list[int], slots: list[int]) -> torch.Tensor:
        """One expert after the other is dequantised, so that only one is ever in memory twice."""
        results = []
        for x, slot in zip(rows.split_with_sizes(sizes), slots, strict=True):
            gate_up, down = (w.dequantize(x.dtype).t() for w in self._cache.packed[slot])
            biases = self._biases([slot])
            found = ops.grouped_experts(x, [len(x)], [gate_up], [down], self._gating, biases)
            results.append(found)
        return torch.cat(results)


def _native_pool(layout: ExpertLayout) -> CpuExperts | None:
    """Threads that compute unquantised experts from their slots; None where torch does it."""
    dtype = getattr(torch, layout.dtype)
    if not serves("grouped_experts", "native", "cpu", dtype):
        return None
    assert layout.part("gate_up").offset == 0
    offset = layout.part("down").offset
    pool = CpuExperts(CpuShape(layout.hidden, layout.intermediate, dtype, offset))
    pool.start(torch.get_num_threads())
    return pool
