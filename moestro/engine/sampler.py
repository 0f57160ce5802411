"""From logits to tokens, each row by its own parameters.

Owns: penalties, filters, the random numbers and log-probabilities. The random number of output
position p is a hash of (seed, p), so batch neighbours and preemption change nothing. Order of
edits: the grammar's mask, logit_bias and bans, repetition penalty, frequency and presence penalty,
temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from moestro.grammar.constraint import Constraint
from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import words
from moestro.scheduler.plan import Sampled, SweepRow
from moestro.types import Request, SamplingParams, TokenLogprobs

NOT_FINITE = "the model's output is not a finite number"
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) that depends on (seed, position) alone (SplitMix64, Steele 2014)."""
    z = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & _MASK
    z ^= z >> 31
    return ((z >> 11) + 0.5) / (1 << 53)


class Row:
    """What the sampler keeps for one sequence: its parameters and the tokens it has seen."""

    def __init__(
        self,
        request: Request,
        vocab_size: int,
        device: torch.device | str = "cpu",
        matcher: Matcher | None = None,
    ) -> None:
        params = request.sampling
        self.params = params
        self.constraint = None if matcher is None else Constraint(matcher, params)
        self.greedy = params.temperature == 0.0
        self.edits = bool(params.logit_bias) or _penalises(params)
        stops = [*params.eos_token_ids, *params.stop_token_ids]
        self._stops = torch.tensor(stops).long().to(device)
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias)).long().to(device)
            self._bias = ids, torch.tensor(list(params.logit_bias.values())).to(device)
        self._counts: torch.Tensor | None = None  # [vocab] outputs so far
        self._seen: torch.Tensor | None = None  # [vocab] bool, prompt and outputs
        if _penalises(params):
            self._counts = torch.zeros(vocab_size, device=device)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[list(request.prompt)] = True
        for token in request.generated:
            self.record(token)

    def banned(self, index: int) -> bool:
        """Whether output `index` must not end the sequence. A grammar's mask sees to it itself."""
        return self.constraint is None and index < self.params.min_tokens and len(self._stops) > 0

    def edit(self, logits: torch.Tensor, index: int) -> None:
        """Apply bias, bans and penalties to one row [vocab] in place."""
        params = self.params
        if self._bias is not None:
            logits.index_add_(0, *self._bias)
        if self.banned(index):
            logits[self._stops] = -math.inf
        if self._counts is None or self._seen is None:
            return
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            torch.where(self._seen, scaled, logits, out=logits)
        logits -= params.frequency_penalty * self._counts
        logits -= params.presence_penalty * (self._counts > 0)

    def record(self, token: int) -> None:
        """This token was chosen."""
        if self._counts is not None and self._seen is not None:
            self._counts[token] += 1
            self._seen[token] = True


def _penalises(params: SamplingParams) -> bool:
    neutral = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    return neutral != (0.0, 0.0, 1.0)


class Sampler:
    """Chooses tokens for the rows of a step."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._rows: dict[str, Row] = {}

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """A new sequence; `matcher` when it has a grammar."""
        self._rows[request.id] = Row(request, self._vocab, matcher=matcher)

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._rows.pop(id, None)

    def params(self, id: str) -> SamplingParams:
        """The parameters of a known sequence."""
        return self._rows[id].params

    def sample(
        self, ids: Sequence[str], indexes: Sequence[int], logits: torch.Tensor
    ) -> list[Sampled]:
        """One token a row. logits [B, vocab] float32 (may be overwritten); `indexes` are the
        numbers of outputs sampled before. A row whose logits are not finite gets an error, as does
        one whose grammar allows nothing."""
        rows = [self._rows[id] for id in ids]
        best, greedy = logits.max(-1)
        finite = torch.isfinite(best).tolist()
        logprobs = self._logprobs(rows, logits)
        tokens = greedy.tolist()
        faults: dict[int, str | None] = {}
        for i, (row, index) in enumerate(zip(rows, indexes, strict=True)):
            if row.constraint is not None:
                faults[i] = constrain(row.constraint, index, logits[i])
            elif not (row.edits or row.banned(index)):
                continue
            row.edit(logits[i], index)
            tokens[i] = int(logits[i].argmax())
        drawn = [i for i, row in enumerate(rows) if not row.greedy and finite[i]]
        if drawn:
            chosen = draw(
                logits[drawn],
                [rows[i].params for i in drawn],
                [uniform(rows[i].params.seed, indexes[i]) for i in drawn],
            )
            for i, token in zip(drawn, chosen, strict=True):
                tokens[i] = token
        for i, fine in enumerate(finite):
            if not fine:
                faults[i] = NOT_FINITE
        return [
            self._result(
                Sampled(id, tokens[i], error=faults.get(i)),
                indexes[i],
                None if logprobs is None else logprobs[i],
            )
            for i, id in enumerate(ids)
        ]

    def _logprobs(self, rows: list[Row], logits: torch.Tensor) -> torch.Tensor | None:
        if all(row.params.logprobs is None for row in rows):
            return None
        return torch.log_softmax(logits, -1)

    def _result(self, one: Sampled, index: int, logprobs: torch.Tensor | None) -> Sampled:
        """The same with all that is reported of it."""
        if one.error is not None:
            return Sampled(one.id, 0, error=one.error)
        row, token = self._rows[one.id], one.token
        row.record(token)
        wanted, complete = row.params.logprobs, False
        if row.constraint is not None:
            row.constraint.record(token, index)
            complete = row.constraint.complete
        if wanted is None or logprobs is None:
            return Sampled(one.id, token, complete=complete)
        return Sampled(one.id, token, token_logprobs(logprobs, token, wanted), complete=complete)


def constrain(constraint: Constraint, index: int, logits: torch.Tensor) -> str | None:
    """Set what output `index` may not be to -inf in one row [vocab]; returns why it can be
    nothing, and then changes nothing, or None."""
    bits = np.empty(words(len(logits)), np.int32)
    fault = constraint.allow_into(bits, index)
    allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(logits)]
    logits.masked_fill_(torch.from_numpy(allowed) == 0, -math.inf)
    return fault


def token_logprobs(logprobs: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """One position's report from log-probabilities [vocab]."""
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = logprobs.topk(min(count, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)


class PromptScores:
    """Log-probabilities of prompt tokens, each predicted by the position before it. Keeps the last
    hidden row of a prompt's earlier sweep, which predicts the first token of the next."""

    def __init__(self, vocab_size: int) -> None:
        self._chunk = max(1, int(2**22 / vocab_size))  # rows: 16 MiB of logits at a time
        self._carry: dict[str, torch.Tensor] = {}

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._carry.pop(id, None)

    def reports(
        self,
        row: SweepRow,
        rows: torch.Tensor,
        count: int | None,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[TokenLogprobs | None, ...] | None:
        """Reports for the tokens of this run, whose rows at the top are `rows` [T, hidden], with
        `count` alternatives; None when nobody asked. `logits`: [n, hidden] -> [n, vocab].
        """
        if count is None or row.output_index > 0:
            return None
        before = self._carry.pop(row.id, None)
        if not row.samples:
            self._carry[row.id] = rows[-1:].clone()
        reports: list[TokenLogprobs | None] = []
        hidden = rows[:-1] if before is None else torch.cat((before, rows[:-1]))
        tokens = row.tokens[1:] if before is None else row.tokens
        if before is None:
            reports.append(None)
        for lo in range(0, len(tokens), self._chunk):
            part = slice(lo, lo + self._chunk)
            logprobs = torch.log_softmax(logits(hidden[part]), -1).cpu()
            pairs = zip(tokens[part], logprobs, strict=True)
            reports.extend(token_logprobs(line, token, count) for token, line in pairs)
        return tuple(reports)


def with_prompt(
    id: str, one: Sampled | None, prompt: tuple[TokenLogprobs | None, ...] | None
) -> Sampled | None:
    """What a row of a sweep sampled, if it did, with its prompt's reports, if it has any."""
    if prompt is None:
        return one
    return replace(one or Sampled(id, -1), prompt_logprobs=prompt)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]
) -> list[int]:
    """Sample each row of logits [R, vocab] by inverse cumulative probability at numbers[r]."""
    heat = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    scaled = logits - logits.max(-1, keepdim=True).values
    probs = torch.softmax(scaled.double() / heat[:, None].double(), -1)
    probs = _filter(probs, params)
    cumulative = probs.cumsum(-1)
    targets = torch.tensor(numbers, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    vocab = logits.shape[-1]
    return [
        # Rounding must not lead behind the last token that has a probability.
        token if token < vocab else int(probs[row].nonzero()[-1])
        for row, token in enumerate(found.tolist())
    ]


def _filter(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero what min_p, top_k and top_p leave out; the best token always stays."""
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params], dtype=probs.dtype)[:, None]
        probs = probs.masked_fill(probs < floor * probs.max(-1, keepdim=True).values, 0.0)
    if all(p.top_k == 0 and p.top_p >= 1.0 for p in params):
        return probs
    ranked, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    vocab = probs.shape[-1]
    counts = torch.tensor([p.top_k or vocab for p in params])[:, None]
    ranked = ranked.masked_fill(torch.arange(vocab)[None, :] >= counts, 0.0)
    share = torch.tensor([p.top_p for p in params], dtype=probs.dtype)[:, None]
    before = ranked.cumsum(-1) - ranked
    ranked = ranked.masked_fill(before >= share * ranked.sum(-1, keepdim=True), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)
