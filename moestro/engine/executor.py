"""Carries out plans: decode steps and sweeps, through one decoder.

Owns: the open sweeps and the sampler. Does not own: what runs when (`scheduler`), the loop
(`engine.engine`) or where experts are (`expert_cache`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from moestro.engine.batch import DecodeBuilder
from moestro.engine.decoder import Decoder
from moestro.engine.experts import ExpertExecutor
from moestro.engine.sampler import PromptScores, Sampler, with_prompt
from moestro.engine.sweep import Sweep
from moestro.expert_cache.cache import ExpertCache
from moestro.grammar.matcher import Matcher
from moestro.kernels.registry import serves
from moestro.kv_cache.storage import KVStorage
from moestro.scheduler.plan import DecodePlan, Sampled, SweepPlan
from moestro.types import Request

# Work between two looks at the clock while a sweep advances: half a millisecond of one core, so
# that a decode step is never kept waiting for much longer than its budget says.
PIECE_FLOPS = 2e7


class Executor:
    """Runs steps on the CPU."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVStorage,
        cache: ExpertCache,
        threads: int = 1,
        sampler: Sampler | None = None,
    ) -> None:
        native_kernels = serves("decode_attention", "native", "cpu", decoder.dtype) and all(
            layer.attention.reads_pages for layer in decoder.layers
        )
        spec = decoder.spec
        self._decoder = decoder
        self._kv = kv
        self._cache = cache
        self._piece = PIECE_FLOPS * threads
        self._experts = ExpertExecutor(cache, spec.moe.experts, self._piece, spec.moe.activation)
        self._builder = DecodeBuilder(
            kv.block_size,
            kv.layers,
            decoder.rotary,
            kv.kinds,
            native_kernels,
        )
        self._sampler = sampler or Sampler(spec.vocab_size)
        self._done: deque[list[Sampled]] = deque()
        self._sweeps: dict[int, tuple[SweepPlan, Sweep]] = {}
        self._prompts = PromptScores(spec.vocab_size)

    @property
    def exposed(self) -> float:
        """Seconds that compute stood still for experts, since start."""
        return self._experts.exposed

    @property
    def sweeping(self) -> bool:
        """A sweep is open."""
        return bool(self._sweeps)

    @torch.inference_mode()
    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Get ready for a new sequence; `matcher` when it has a grammar."""
        self._sampler.add(request, matcher)

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._sampler.forget(id)
        self._builder.forget(id)
        self._prompts.forget(id)
        self._cache.finish_sequence(id)

    def runs_ahead(self, plan: DecodePlan) -> bool:
        """Never: a launched step is done."""
        return False

    @torch.inference_mode()
    def launch(self, plan: DecodePlan) -> None:
        """Run a decode step; `collect` gives its result."""
        self._done.append(self._decode(plan))

    def collect(self) -> list[Sampled]:
        """One token for every row of the oldest step that was not collected."""
        return self._done.popleft()

    def _decode(self, plan: DecodePlan) -> list[Sampled]:
        self._cache.begin_pass("decode", len(plan.rows))
        steps = self._builder.build(plan)
        logits = self._decoder.decode(steps, self._kv, self._experts)
        indexes = [row.output_index for row in plan.rows]
        sampled = self._sampler.sample(steps[0].ids, indexes, logits)
        for row, one in zip(plan.rows, sampled, strict=True):
            if one.error is not None:
                self._kv.scrub(row.held)
        return sampled

    @torch.inference_mode()
    def open(self, plan: SweepPlan) -> None:
        """Begin a sweep; nothing is computed yet."""
        self._cache.begin_pass("sweep", sum(len(row.tokens) for row in plan.rows))
        sweep = Sweep(plan, self._decoder, self._kv, self._experts, self._piece)
        self._sweeps[plan.number] = plan, sweep

    def drop(self, number: int, id: str) -> bool:
        """The sequence left this sweep; it must write no KV from now on. A sweep that all have
        left is over, nobody will advance it: then True."""
        if number not in self._sweeps:
            return True
        _, sweep = self._sweeps[number]
        sweep.drop(id)
        over = not any(segment.alive for segment in sweep.segments)
        if over:
            del self._sweeps[number]
        return over

    def close(self, number: int) -> tuple[str, ...]:
        """Give a sweep up; returns the sequences that were in it."""
        plan, _ = self._sweeps.pop(number)
        return tuple(row.id for row in plan.rows)

    @torch.inference_mode()
    def advance(self, number: int, enough: Callable[[], bool]) -> list[Sampled] | None:
        """Advance a sweep until it is done (its results) or `enough()` (None)."""
        if number not in self._sweeps:
            return []
        plan, sweep = self._sweeps[number]
        rows = sum(len(row.tokens) for row in plan.rows)
        self._cache.begin_pass("sweep", rows, resumed=True)
        while not sweep.advance():
            if enough():
                return None
        results = self._results(sweep)
        del self._sweeps[number]  # last: when anything above raises, `close` still finds it
        return results

    def _results(self, sweep: Sweep) -> list[Sampled]:
        top = sweep.top()
        sampling = [(segment, rows) for segment, rows in top if segment.row.samples]
        found: dict[str, Sampled] = {}
        if sampling:
            logits = self._decoder.logits(torch.stack([rows[-1] for _, rows in sampling]))
            ids = [segment.row.id for segment, _ in sampling]
            indexes = [segment.row.output_index for segment, _ in sampling]
            found = {one.id: one for one in self._sampler.sample(ids, indexes, logits)}
        results = []
        for segment, rows in top:
            one = found.get(segment.row.id)
            if one is not None and one.error is not None:
                self._kv.scrub(segment.row.held)
            count = self._sampler.params(segment.row.id).prompt_logprobs
            prompt = self._prompts.reports(segment.row, rows, count, self._decoder.logits)
            one = with_prompt(segment.row.id, one, prompt)
            if one is not None:
                results.append(one)
        return results
