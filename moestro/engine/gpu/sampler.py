"""Sampling on the device beyond what a graph does by itself.

Owns: which rows need more than temperature and min_p, masks of grammars, edits to logits, top-k and
top-p, and log-probabilities. Does not own: the kernels (`kernels.gpu.sampling`) or what edits mean
(`engine.sampler`). Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from moestro.engine.sampler import Row
from moestro.engine.synthetic import SPECIAL, row_number
from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import words
from moestro.kernels.gpu import sampling
from moestro.kernels.gpu.transfer import download, send
from moestro.types import Request, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities on their way to the host: of the tokens [B], and the best [B, n]."""

    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def of(self, row: int, token: int, count: int) -> TokenLogprobs:
        """One row's report. The copies must have arrived."""
        pairs = zip(self.ids[row, :count].tolist(), self.values[row, :count].tolist(), strict=True)
        return TokenLogprobs(token, float(self.chosen[row]), tuple(pairs))


@dataclass(frozen=True, slots=True)
class Choice:
    """What the host knows of tokens that are being chosen."""

    scores: Scores | None = None  # if a row wants log-probabilities
    faults: Mapping[str, str] = field(default_factory=dict)  # sequences that nothing is allowed to


class DeviceSampler:
    """What is known of the rows' sequences, and the launches that choose their tokens."""

    def __init__(self, vocab_size: int, device: torch.device, *, scramble: bool) -> None:
        self.vocab = vocab_size
        self.scramble = scramble
        self._device = device
        self._rows: dict[str, Row] = {}
        if device.type == "cuda":  # compile now: no request should wait for it
            bits = torch.zeros(1, words(vocab_size), dtype=torch.int32, device=device)
            sampling.mask(torch.zeros(1, vocab_size, device=device), bits[0, :1], bits)

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """A new sequence; `matcher` when it has a grammar."""
        self._rows[request.id] = Row(request, self.vocab, self._device, matcher)

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._rows.pop(id, None)

    def params(self, id: str) -> SamplingParams:
        """The parameters of a known sequence."""
        return self._rows[id].params

    def knows(self, id: str) -> bool:
        """Whether the sequence has not been forgotten."""
        return id in self._rows

    def record(self, id: str, token: int, index: int) -> bool:
        """This token was chosen as output `index`; True when its grammar is complete with it.
        Harmless for a sequence that is gone."""
        row = self._rows.get(id)
        if row is None:
            return False
        row.record(token)
        if row.constraint is None:
            return False
        row.constraint.record(token, index)
        return row.constraint.complete

    def foresee(self, id: str, token: int, index: int) -> None:
        """The same while it is still to be recorded, for the mask of the output after it."""
        row = self._rows.get(id)
        if row is not None and row.constraint is not None:
            row.constraint.record(token, index)

    def constrained(self, id: str) -> bool:
        """Whether the sequence has a grammar: its mask needs all outputs before."""
        return self._rows[id].constraint is not None

    def needs_past(self, id: str, index: int) -> bool:
        """Whether output `index` depends on outputs before it by more than the model."""
        return self._rows[id].edits or self._rows[id].banned(index)

    def plain(self, id: str, index: int) -> bool:
        """Whether a graph's own token is the one: no edits, no top-k or top-p, no reports."""
        row = self._rows[id]
        params = row.params
        filters = not row.greedy and (params.top_k > 0 or params.top_p < 1.0)
        reports = params.logprobs is not None
        return not (filters or reports or self.constrained(id) or self.needs_past(id, index))

    def salt(self, id: str, index: int) -> int:
        """What scrambling adds to output `index` of a sequence."""
        return index * 104729 + row_number(id) * 15485863

    def choose(
        self,
        ids: Mapping[int, tuple[str, int]],
        logits: torch.Tensor,
        rows: sampling.Rows,
        *,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        known: bool = True,
    ) -> Choice:
        """Tokens of all rows of logits [B, V] (overwritten) into `tokens` and `finite` [B].

        `ids`: row -> (sequence, its output number), for the rows that are real. `known`: all
        outputs before are recorded or foreseen; otherwise what is chosen will be chosen again.
        """
        edited = {at: who for at, who in ids.items() if self.needs_past(*who)}
        params = [self._rows[id].params for id, _ in ids.values()]
        most = max((-1 if p.logprobs is None else p.logprobs for p in params), default=-1)
        masked = [(at, *who) for at, who in ids.items() if known and self.constrained(who[0])]
        raw = logits.clone() if (edited or masked) and most >= 0 else logits
        faults = self._mask(masked, logits) if masked else {}
        for at, (id, index) in edited.items():
            self._rows[id].edit(logits[at], index)
        scratch = sampling.Scratch.empty(len(logits), self.vocab, self._device)
        top = _bound(params)
        sampling.sample(logits, rows, top, scratch=scratch, tokens=tokens, finite=finite)
        if most < 0:
            return Choice(None, faults)
        found = sampling.logprobs(raw, tokens, most)
        return Choice(Scores(*map(download, found)), faults)

    def _mask(
        self, masked: Sequence[tuple[int, str, int]], logits: torch.Tensor
    ) -> Mapping[str, str]:
        """Mask (row, sequence, output number); returns why some can choose nothing."""
        bits = np.empty((len(masked), words(self.vocab)), np.int32)
        faults = {}
        for line, (_, id, index) in zip(bits, masked, strict=True):
            constraint = self._rows[id].constraint
            assert constraint is not None
            fault = constraint.allow_into(line, index)
            if fault is not None:
                faults[id] = fault
        at = np.array([row for row, _, _ in masked], np.int32)
        sampling.mask(logits, send(at, self._device), send(bits, self._device))
        return faults


def scramble_(tokens: torch.Tensor, salt: torch.Tensor, vocab: int) -> None:
    """Replace tokens int64 [B] as `engine.synthetic.scrambled` does, given `salt` [B]."""
    tokens.mul_(7919).add_(salt).remainder_(vocab - SPECIAL).add_(SPECIAL)


def _bound(params: Sequence[SamplingParams]) -> int | None:
    """What `kernels.gpu.sampling.sample` wants to know of top-k and top-p."""
    filters = [p for p in params if p.temperature and (p.top_k > 0 or p.top_p < 1.0)]
    if any(p.top_k == 0 for p in filters):
        return None
    return max((p.top_k for p in filters), default=0)
