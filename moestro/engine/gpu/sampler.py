"""Sampling on the device beyond what a graph does by itself.

Owns: which rows need more than temperature and min_p, edits to their logits, top-k and top-p, and
log-probabilities. Does not own: the kernels (`kernels.gpu.sampling`) or what edits mean
(`engine.sampler`). Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moestro.engine.sampler import Row
from moestro.engine.synthetic import SPECIAL, row_number
from moestro.kernels.gpu import sampling
from moestro.kernels.gpu.transfer import download
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


class DeviceSampler:
    """What is known of the rows' sequences, and the launches that choose their tokens."""

    def __init__(self, vocab_size: int, device: torch.device, *, scramble: bool) -> None:
        self.vocab = vocab_size
        self.scramble = scramble
        self._device = device
        self._rows: dict[str, Row] = {}

    def add(self, request: Request) -> None:
        """A new sequence."""
        self._rows[request.id] = Row(request, self.vocab, self._device)

    def forget(self, id: str) -> None:
        """The sequence is gone."""
        self._rows.pop(id, None)

    def params(self, id: str) -> SamplingParams:
        """The parameters of a known sequence."""
        return self._rows[id].params

    def knows(self, id: str) -> bool:
        """Whether the sequence has not been forgotten."""
        return id in self._rows

    def record(self, id: str, token: int) -> None:
        """This token was chosen. Harmless for a sequence that is gone."""
        row = self._rows.get(id)
        if row is not None:
            row.record(token)

    def needs_past(self, id: str, index: int) -> bool:
        """Whether output `index` depends on outputs before it by more than the model."""
        return self._rows[id].edits or self._rows[id].banned(index)

    def plain(self, id: str, index: int) -> bool:
        """Whether a graph's own token is the one: no edits, no top-k or top-p, no reports."""
        row = self._rows[id]
        params = row.params
        filters = not row.greedy and (params.top_k > 0 or params.top_p < 1.0)
        return not (filters or params.logprobs is not None or self.needs_past(id, index))

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
    ) -> Scores | None:
        """Tokens of all rows of logits [B, V] (overwritten) into `tokens` and `finite` [B].

        `ids`: row -> (sequence, its output number), for the rows that are real. Returns the
        log-probabilities if a row wants them.
        """
        edited = {at: who for at, who in ids.items() if self.needs_past(*who)}
        params = [self._rows[id].params for id, _ in ids.values()]
        most = max((-1 if p.logprobs is None else p.logprobs for p in params), default=-1)
        raw = logits.clone() if edited and most >= 0 else logits
        for at, (id, index) in edited.items():
            self._rows[id].edit(logits[at], index)
        scratch = sampling.Scratch.empty(len(logits), self.vocab, self._device)
        top = _bound(params)
        sampling.sample(logits, rows, top, scratch=scratch, tokens=tokens, finite=finite)
        if most < 0:
            return None
        found = sampling.logprobs(raw, tokens, most)
        return Scores(*map(download, found))


def scramble_(tokens: torch.Tensor, salt: torch.Tensor, vocab: int) -> None:
    """Replace tokens int64 [B] as `engine.synthetic.scrambled` does, given `salt` [B]."""
    tokens.mul_(7919).add_(salt).remainder_(vocab - SPECIAL).add_(SPECIAL)


def _bound(params: Sequence[SamplingParams]) -> int | None:
    """What `kernels.gpu.sampling.sample` wants to know of top-k and top-p."""
    filters = [p for p in params if p.temperature and (p.top_k > 0 or p.top_p < 1.0)]
    if any(p.top_k == 0 for p in filters):
        return None
    return max((p.top_k for p in filters), default=0)
