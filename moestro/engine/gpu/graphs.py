"""Decode steps, captured once for each size of batch and launched with one call.

Owns: the graphs, filling in their input, and the copy of what they report. Does not own: sampling
beyond temperature (`engine.gpu.sampler`) or when to launch (`engine.engine`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moestro.engine.gpu.buffers import LINE, buckets
from moestro.engine.gpu.rows import RowTable, Seating
from moestro.engine.gpu.step import Shared, Step
from moestro.kernels.gpu.transfer import upload
from moestro.scheduler.plan import DecodePlan
from moestro.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: the plan's i-th row is row `seats[i]`."""

    step: Step
    seats: list[int]


class Graphs:
    """All sizes of one model."""

    @torch.inference_mode()
    def __init__(
        self, shared: Shared, most_rows: int, progress: Callable[[int, int], None]
    ) -> None:
        self._shared = shared
        self._sizes = buckets(most_rows)
        self._rows = RowTable()
        self._spare = shared.tables.shape[1] - 1  # the column that padded rows write to
        self._steps = [Step(shared, size) for size in self._sizes]
        self._launch: list[Callable[[], None]] = []
        on_gpu = shared.tables.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        shared.given.upload(self._blank())
        for number in reversed(range(len(self._steps))):  # the largest first: the rest reuse memory
            self._launch.append(self._capture(self._steps[number]))
            progress(len(self._launch), len(self._steps))
        self._launch.reverse()

    def launch(
        self,
        plan: DecodePlan,
        params: Callable[[str], SamplingParams],
        salts: Callable[[str, int], int] | None = None,
    ) -> Launched:
        """Start a step; the device's copy of the tokens before it is used where the plan has
        none. `salts` are for made-up tokens."""
        rows = plan.rows
        before = [self._rows.seat_of(row.id) for row in rows]
        seating = self._rows.seat(rows)
        given = self._fill(plan, params, before, seating)
        if salts is not None:
            for row, seat in zip(rows, seating.seats, strict=True):
                given[LINE["salt"], seat] = salts(row.id, row.output_index)
        for index in seating.rewritten:
            self._rewrite(seating.seats[index], rows[index].blocks)
        self._shared.given.upload(given)
        number = bisect_left(self._sizes, len(rows))
        self._launch[number]()
        return Launched(self._steps[number], seating.seats)

    def seats(self, plan: DecodePlan) -> list[int]:
        """The rows that `launch` will give to this plan."""
        return self._rows.preview(plan.rows)

    def _fill(
        self,
        plan: DecodePlan,
        params: Callable[[str], SamplingParams],
        before: list[int | None],
        seating: Seating,
    ) -> npt.NDArray[np.int64]:
        given = self._blank()
        size, layers = self._shared.kv.block_size, self._shared.kv.layers
        grown = set(seating.grown)
        floats = given.view(np.float64)
        given[LINE["rows"], 0] = len(plan.rows)
        for index, (row, seat) in enumerate(zip(plan.rows, seating.seats, strict=True)):
            line = given[:, seat]
            if row.token is None:
                source = before[index]
                assert source is not None, f"{row.id} has no token and no row"
                line[LINE["source"]] = source
            else:
                line[LINE["token"]] = row.token
            line[LINE["position"]] = row.position
            block, offset = divmod(row.position, size)
            line[LINE["place"]] = row.blocks[block] * layers * size + offset
            if index in grown:
                line[LINE["column"]] = len(row.blocks) - 1
                line[LINE["block"]] = row.blocks[-1]
            sampling = params(row.id)
            line[LINE["output_index"]] = row.output_index
            if sampling.temperature:
                line[LINE["seed"]] = np.uint64(sampling.seed).astype(np.int64)
                line[LINE["top_k"]] = sampling.top_k
                floats[LINE["temperature"], seat] = sampling.temperature
                floats[LINE["top_p"], seat] = sampling.top_p
                floats[LINE["min_p"], seat] = sampling.min_p
        return given

    def _blank(self) -> npt.NDArray[np.int64]:
        given = self._shared.given.blank()
        given[LINE["column"]] = self._spare
        return given

    def _rewrite(self, seat: int, blocks: tuple[int, ...]) -> None:
        upload(np.array(blocks, np.int32), self._shared.tables[seat, : len(blocks)])

    def _capture(self, step: Step) -> Callable[[], None]:
        """A function that launches the step."""

        def run() -> None:
            step.run()
            step.finish()

        if self._shared.tables.device.type != "cuda":
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles the kernels
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay
