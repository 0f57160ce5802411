"""Carries out plans on a CUDA device.

Owns: the order of launches, what is collected when, and what happens when a step found an expert
in no memory that the device can read. Does not own: what runs when (`scheduler`), or kernels.

A step is launched without waiting for the one before it; its tokens stay on the device. `collect`
waits for the oldest launched step and reads its report. Everything is launched on one stream, so
that a block or slot given to somebody else is written after its last reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moestro.engine.gpu.graphs import Graphs, Launched
from moestro.engine.gpu.sampler import Choice, DeviceSampler, scramble_
from moestro.engine.gpu.step import Shared
from moestro.engine.gpu.sweep import GpuSweep
from moestro.engine.gpu.workspace import Workspace
from moestro.engine.sampler import NOT_FINITE, PromptScores, with_prompt
from moestro.engine.synthetic import RoutingSource
from moestro.errors import StepFailed
from moestro.expert_cache.stream import ExpertStream
from moestro.grammar.matcher import Matcher
from moestro.kernels.gpu import sampling
from moestro.kernels.gpu.tables import Fault
from moestro.kernels.gpu.transfer import Mark, synchronize, upload
from moestro.scheduler.plan import DecodePlan, DecodeRow, Sampled, SweepPlan, SweepRow
from moestro.types import Request, TokenLogprobs

Arrays = dict[str, npt.NDArray[Any]]
# Pieces of a sweep that are under way while the host prepares the next one: short of time for a
# decode step few, otherwise enough that the device never waits.
BESIDE_STEPS, ALONE = 1, 6


@dataclass(slots=True)
class Flying:
    """A launched step and what will come back from it."""

    plan: DecodePlan
    launched: Launched
    report: Arrays
    choice: Choice
    arrived: Mark


class GpuExecutor:
    """Runs steps on one CUDA device."""

    def __init__(
        self,
        shared: Shared,
        graphs: Graphs,
        sampler: DeviceSampler,
        spaces: tuple[Workspace, Workspace],
        routing: RoutingSource | None = None,
    ) -> None:
        self._shared = shared
        self._device = shared.tables.device
        self._graphs = graphs
        self._sampler = sampler
        self._small, self._large = spaces
        self._routing = routing
        self._stream = ExpertStream(shared.cache)
        self._sweeps: dict[int, tuple[SweepPlan, GpuSweep, Workspace]] = {}
        self._prompts = PromptScores(shared.spec.vocab_size)
        self._last: dict[str, int] = {}  # newest token that the host knows
        self._flying: list[Flying] = []
        self._void = False  # a step in flight computed nothing: its plan must be run again
        self._decoded = False  # a step was launched since a sweep was advanced
        self.exposed = 0.0

    @property
    def sweeping(self) -> bool:
        """A sweep is open."""
        return bool(self._sweeps)

    # Sequences

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Get ready for a new sequence; `matcher` when it has a grammar."""
        self._sampler.add(request, matcher)

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._sampler.forget(id)
        self._prompts.forget(id)
        self._last.pop(id, None)
        self._shared.cache.finish_sequence(id)

    # Decode

    def runs_ahead(self, plan: DecodePlan) -> bool:
        """Whether this step may be launched before the one before it has been collected."""
        rows = plan.rows
        return not (self._void or self._shared.cache.dirty) and not any(
            self._sampler.needs_past(row.id, row.output_index) for row in rows
        )

    @torch.inference_mode()
    def launch(self, plan: DecodePlan) -> None:
        """Start a step; `collect` gives its result."""
        self._decoded = True
        cache = self._shared.cache
        if cache.dirty:
            assert not self._flying, "tables are uploaded while a step may change them"
            cache.upload()
        elif self._flying or self._shared.cache.recent:
            cache.refresh()
        if self._routing is not None:
            self._force(plan)
        salts = self._sampler.salt if self._sampler.scramble else None
        launched = self._graphs.launch(plan, self._sampler.params, salts)
        choice = self._choose(plan, launched)
        report = launched.step.report.download()
        flying = Flying(plan, launched, report, choice, Mark(self._device))
        flying.arrived.set()
        self._flying.append(flying)

    @torch.inference_mode()
    def collect(self) -> list[Sampled]:
        """Wait for the oldest launched step: one token for every row of its plan."""
        flying = self._flying.pop(0)
        flying.arrived.wait()
        code, layer = flying.report["fault"].tolist()
        if code != Fault.NONE:
            self._faulted(flying)
        if code == Fault.NO_ANSWER:
            assert self._shared.cache.cpu is not None
            self._shared.cache.cpu.stalled()
        if code == Fault.NO_SLOT:
            raise StepFailed(f"MoE layer {layer} needs more experts at once than there are slots")
        if code != Fault.NONE:
            return self._again(flying)
        self._void = False
        self._record(flying)
        return self._results(flying)

    def _choose(self, plan: DecodePlan, launched: Launched) -> Choice:
        """Sample again where a graph's own tokens are not the ones."""
        if all(self._sampler.plain(row.id, row.output_index) for row in plan.rows):
            return Choice()
        shared, step = self._shared, launched.step
        constrained = any(self._sampler.constrained(row.id) for row in plan.rows)
        known = not constrained or all(map(self._foresee, self._flying))
        places = zip(launched.seats, plan.rows, strict=True)
        choice = self._sampler.choose(
            {seat: (row.id, row.output_index) for seat, row in places},
            shared.logits[: step.rows],
            step.sampling(),
            tokens=shared.sampled[: step.rows],
            finite=step.report.on_device["finite"],
            known=known,
        )
        step.scramble()
        step.finish()
        return choice

    def _foresee(self, flying: Flying) -> bool:
        """Wait for the step before, whose tokens decide over masks, while the device computes the
        one after it. False when it met a fault: then neither has a result."""
        flying.arrived.wait()
        if flying.report["fault"][0] != Fault.NONE:
            return False
        tokens, finite = flying.report["tokens"].tolist(), flying.report["finite"].tolist()
        for row, seat in zip(flying.plan.rows, flying.launched.seats, strict=True):
            if finite[seat] and row.id not in flying.choice.faults:
                self._sampler.foresee(row.id, tokens[seat], row.output_index)
        return True

    def _force(self, plan: DecodePlan) -> None:
        """Upload made-up routing, in the order of the seats that the rows will get."""
        assert self._routing is not None and self._shared.forced is not None
        seats = self._graphs.seats(plan)
        ids = self._routing.step([row.id for row in plan.rows])
        ordered = np.empty_like(ids)
        ordered[:, seats] = ids
        upload(ordered, self._shared.forced[:, : len(seats)])

    def _record(self, flying: Flying) -> None:
        report, seats = flying.report, flying.launched.seats
        jobs, computed, cache = report["n_jobs"], report["n_cpu"], self._shared.cache
        fetching = np.where(jobs > 0, report["ended"] - report["started"], 0) * 1e-9
        waited = fetching
        if cache.cpu is not None:
            lone = np.where(computed > 0, report["answered"] - report["waiting"], 0) * 1e-9
            answer = np.where(computed > 0, report["answered"] - report["started"], 0) * 1e-9
            spent = np.where(computed > 0, report["spent"], 0) * 1e-9
            cache.cpu.split.observe(jobs, fetching, computed, spent, lone, answer)
            waited = fetching + lone
        ids = report["ids"][:, seats]
        sequences = [row.id for row in flying.plan.rows]
        cache.collect(ids, jobs, report["job_key"], report["job_slot"], computed, waited, sequences)
        self.exposed += float(waited.sum())

    def _results(self, flying: Flying) -> list[Sampled]:
        tokens = flying.report["tokens"].tolist()
        finite = flying.report["finite"].tolist()
        results = []
        for row, seat in zip(flying.plan.rows, flying.launched.seats, strict=True):
            if not finite[seat]:
                self._shared.kv.scrub(row.blocks)
                results.append(Sampled(row.id, 0, error=NOT_FINITE))
                continue
            if row.id in flying.choice.faults:
                results.append(Sampled(row.id, 0, error=flying.choice.faults[row.id]))
                continue
            token = tokens[seat]
            complete = self._sampler.record(row.id, token, row.output_index)
            self._last[row.id] = token
            report = self._scored(flying, row, seat, token)
            results.append(Sampled(row.id, token, report, complete=complete))
        return results

    def _scored(
        self, flying: Flying, row: DecodeRow, seat: int, token: int
    ) -> TokenLogprobs | None:
        scores = flying.choice.scores
        if scores is None or not self._sampler.knows(row.id):
            return None
        wanted = self._sampler.params(row.id).logprobs
        return None if wanted is None else scores.of(seat, token, wanted)

    def _faulted(self, flying: Flying) -> None:
        """This step has no result, nor has the one launched after it."""
        synchronize(self._device)
        self._void = bool(self._flying)
        report = flying.report
        self._shared.cache.faulted(report["n_jobs"], report["job_key"], report["job_slot"])

    def _again(self, flying: Flying) -> list[Sampled]:
        """A step stopped at an expert that no memory had. Its rows go through a sweep of one token
        each, which can read from disk. What it wrote to the KV cache is written again."""
        rows = [row for row in flying.plan.rows if self._sampler.knows(row.id)]
        runs = tuple(
            SweepRow(
                id=row.id,
                tokens=(self._last[row.id] if row.token is None else row.token,),
                start=row.position,
                blocks=row.blocks,
                output_index=row.output_index,
                samples=True,
            )
            for row in rows
        )
        if not runs:
            return []
        space = (
            self._small
            if self._small.tokens >= len(runs) and not self._busy(self._small)
            else self._large
        )
        sweep = GpuSweep(SweepPlan(-1, runs), self._shared, self._stream, space)
        while not sweep.advance():
            pass
        results = self._sample_top(sweep)
        sweep.close()
        seats = dict(zip((row.id for row in flying.plan.rows), flying.launched.seats, strict=True))
        for one in results:
            self._shared.sampled[seats[one.id]] = one.token
        return results

    # Sweeps

    @torch.inference_mode()
    def open(self, plan: SweepPlan) -> None:
        """Begin a sweep; nothing is computed yet."""
        tokens = sum(len(row.tokens) for row in plan.rows)
        fits = [
            space
            for space in (self._small, self._large)
            if space.tokens >= tokens and not self._busy(space)
        ]
        assert fits, f"no room for a sweep of {tokens} tokens"
        sweep = GpuSweep(plan, self._shared, self._stream, fits[0])
        self._sweeps[plan.number] = plan, sweep, fits[0]

    @torch.inference_mode()
    def drop(self, number: int, id: str) -> bool:
        """The sequence left this sweep; it must write no KV from now on. A sweep that all have
        left is over, nobody will advance it: then True."""
        if number not in self._sweeps:
            return True
        _, sweep, _ = self._sweeps[number]
        sweep.drop(id)
        over = not any(segment.alive for segment in sweep.segments)
        if over:
            self._end(number)
        return over

    @torch.inference_mode()
    def close(self, number: int) -> tuple[str, ...]:
        """Give a sweep up; returns the sequences that were in it."""
        return tuple(row.id for row in self._end(number).rows)

    @torch.inference_mode()
    def advance(self, number: int, enough: Callable[[], bool]) -> list[Sampled] | None:
        """Advance a sweep until it is done (its results) or `enough()` (None)."""
        if number not in self._sweeps:
            return []
        assert not self._flying, "a sweep needs to know what is where"
        _, sweep, _ = self._sweeps[number]
        most = BESIDE_STEPS if self._decoded else ALONE
        self._decoded = False
        under_way: deque[Mark] = deque()
        while not sweep.advance():
            under_way.append(Mark(self._device))
            under_way[-1].set()
            if len(under_way) > most:
                under_way.popleft().wait()
            if enough():
                return None
        results = self._sample_top(sweep)
        self._end(number)
        return results

    def _busy(self, space: Workspace) -> bool:
        return any(space is taken for _, _, taken in self._sweeps.values())

    def _end(self, number: int) -> SweepPlan:
        plan, sweep, _ = self._sweeps.pop(number)
        sweep.close()
        return plan

    def _sample_top(self, sweep: GpuSweep) -> list[Sampled]:
        top = sweep.top()
        sampling_rows = [(segment, rows) for segment, rows in top if segment.row.samples]
        found: dict[str, Sampled] = {}
        if sampling_rows:
            last = torch.stack([rows[-1] for _, rows in sampling_rows])
            found = self._sample(last, [segment.row for segment, _ in sampling_rows])
        results = []
        for segment, rows in top:
            one = found.get(segment.row.id)
            if one is not None and one.error is not None:
                self._shared.kv.scrub(segment.row.blocks)
            count = self._sampler.params(segment.row.id).prompt_logprobs
            prompt = self._prompts.reports(segment.row, rows, count, self._logits)
            one = with_prompt(segment.row.id, one, prompt)
            if one is not None:
                results.append(one)
        return results

    def _sample(self, hidden: torch.Tensor, rows: list[SweepRow]) -> dict[str, Sampled]:
        """Tokens after these rows of the top, [n, hidden]."""
        device = hidden.device
        logits = self._logits(hidden)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        finite = torch.empty(len(rows), dtype=torch.bool, device=device)
        ids = {at: (row.id, row.output_index) for at, row in enumerate(rows)}
        given = self._parameters(rows, device)
        choice = self._sampler.choose(ids, logits, given, tokens=tokens, finite=finite)
        if self._sampler.scramble:
            salts = [self._sampler.salt(row.id, row.output_index) for row in rows]
            scramble_(tokens, torch.tensor(salts, device=device), self._sampler.vocab)
        chosen, fine = tokens.tolist(), finite.tolist()
        found = {}
        for at, row in enumerate(rows):
            error = choice.faults.get(row.id) if fine[at] else NOT_FINITE
            if error is not None:
                found[row.id] = Sampled(row.id, 0, error=error)
                continue
            complete = self._sampler.record(row.id, chosen[at], row.output_index)
            self._last[row.id] = chosen[at]
            wanted = self._sampler.params(row.id).logprobs
            report = None
            if choice.scores is not None and wanted is not None:
                report = choice.scores.of(at, chosen[at], wanted)
            found[row.id] = Sampled(row.id, chosen[at], report, complete=complete)
        return found

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._shared.decoder.score(hidden).float()

    def _parameters(self, rows: list[SweepRow], device: torch.device) -> sampling.Rows:
        params = [self._sampler.params(row.id) for row in rows]
        seeds = np.array([p.seed for p in params], np.uint64).astype(np.int64)

        def on(values: object, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return sampling.Rows(
            temperature=on([p.temperature for p in params], torch.float32),
            top_k=on([p.top_k for p in params], torch.int32),
            top_p=on([p.top_p for p in params], torch.float64),
            min_p=on([p.min_p for p in params], torch.float64),
            seed=on(seeds.tolist(), torch.int64),
            position=on([row.output_index for row in rows], torch.int64),
        )
