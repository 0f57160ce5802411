"""Who is in the next sweep: merging, overtaking, sharing and waiting for a prefix.

Owns: the choice. It changes nothing but a note on sequences that wait for a prefix. Does not
own: starting the chosen (`scheduler.scheduler`).

The rules. Prompts are merged in the order of their claim up to the window, since a sweep pays for
the experts once, however many tokens travel. While a long sweep is open, prompts that are small
beside the window have a sweep of their own. A prompt over the window is the host of its sweeps:
shorter ones behind it may use up to half of the window as guests, so it neither holds them up for
its whole length nor is held up by a stream of them. When a prompt's blocks do not fit, nobody
behind it is admitted: it would starve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge

from moestro.kv_cache.manager import KVManager
from moestro.scheduler.limits import Limits
from moestro.scheduler.queue import Waiting, claim
from moestro.scheduler.sequence import Sequence, Status
from moestro.scheduler.sweeps import Sweeps

SMALL_PART = 8  # a small sweep is at most this part of the window ...
SMALL_TOKENS = 256  # ... or this many tokens: with fewer the weights, not the tokens, cost time
GUEST_PART = 2  # guests get at most this part of a host's window


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could go now."""

    seq: Sequence
    start: int  # tokens that are or would be in the cache
    size: int  # tokens to compute
    needs: int | None  # blocks; None when it has started


@dataclass(slots=True)
class Draft:
    """A sweep while it is being chosen, and what is left for it to take."""

    left: int  # tokens
    seats: int
    blocks: int  # free ones
    reserve: int  # of those, to be left for running sequences
    growth: int  # of those, what each running sequence may take next
    closed: bool = False  # somebody did not fit: only those who have started may go
    shares: list[tuple[Sequence, int]] = field(default_factory=list)  # tokens of each
    promised: set[bytes] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        """Tokens chosen so far."""
        return sum(share for _, share in self.shares)

    def admits(self, candidate: Candidate) -> bool:
        """True when `candidate` can start, or has started."""
        if candidate.needs is None:
            return True
        self.closed = candidate.needs + self.reserve > self.blocks
        return not self.closed

    def add(self, chosen: Candidate, share: int, block_size: int) -> None:
        """Choose the next `share` tokens of `chosen`."""
        self.shares.append((chosen.seq, share))
        self.left -= share
        self.promise(chosen, share, block_size)
        if chosen.needs is not None:
            self.seats -= 1
            self.blocks -= chosen.needs
            self.reserve += self.growth

    def promise(self, chosen: Candidate, share: int, block_size: int) -> None:
        """Note the blocks that `share` tokens of `chosen` fill."""
        first, end = chosen.start // block_size, (chosen.start + share) // block_size
        self.promised.update(chosen.seq.chain.keys[first:end])


class Filling:
    """Chooses sweeps under `limits`."""

    def __init__(self, limits: Limits, kv: KVManager) -> None:
        self._kv = kv
        self.seats = limits.max_num_seqs
        self._window = limits.max_sweep_tokens
        self.small = small_tokens(self._window)

    def choose(
        self, paused: list[Sequence], waiting: Waiting, running: int, sweeps: Sweeps
    ) -> list[tuple[Sequence, int]]:
        """The sequences of the next sweep, and how many tokens of each; empty: none now.

        `paused` are those whose prompts are partly done. A newcomer leaves one free block (in
        every group of layers) for each of the `running`, so that it is not pushed out again at once
        as they grow.
        """
        long_free = sweeps.is_free(small=False)
        small_free = sweeps.is_free(small=True)
        if not long_free and not small_free:
            return []
        draft = Draft(
            left=self._window if long_free else self.small,
            seats=self.seats - running,
            blocks=self._kv.free_blocks,
            reserve=running * self._kv.growth,
            growth=self._kv.growth,
        )
        candidates = self._candidates(paused, waiting, draft, sweeps)
        self._fill(draft, candidates, long_free)
        if not small_free and draft.tokens <= self.small:
            return []  # the small sweep ahead is soon done, and these can all go together then
        return draft.shares

    def _fill(self, draft: Draft, candidates: Iterator[Candidate], long_free: bool) -> None:
        for candidate in candidates:
            if not long_free and candidate.size > self.small:
                continue
            if not draft.admits(candidate):
                continue
            if candidate.size > draft.left:
                if long_free and not draft.shares:
                    self._host(draft, candidate, candidates)
                return
            draft.add(candidate, candidate.size, self._kv.block_size)
            if not draft.left:
                return

    def _host(self, draft: Draft, host: Candidate, others: Iterator[Candidate]) -> None:
        draft.promise(host, draft.left, self._kv.block_size)  # as if nobody needed a guest's part
        draft.add(host, draft.left - draft.left // GUEST_PART, self._kv.block_size)
        for guest in others:
            if not draft.left:
                break
            # A small one has its own sweep; one as long as the host would only slow both down.
            if guest.size <= self.small or guest.size * 2 > host.size:
                continue
            if draft.admits(guest):
                draft.add(guest, min(guest.size, draft.left), self._kv.block_size)
        draft.shares[0] = (host.seq, draft.shares[0][1] + draft.left)

    def _candidates(
        self, paused: list[Sequence], waiting: Waiting, draft: Draft, sweeps: Sweeps
    ) -> Iterator[Candidate]:
        only_small = not sweeps.is_free(small=False)
        line = waiting.overtakers() if only_small else iter(waiting)
        for seq in merge(paused, line, key=claim):
            if seq.status is not Status.WAITING:
                yield Candidate(seq, seq.computed, seq.remaining, None)
            elif seq.held:
                continue  # the others need not wait for its grammar
            elif draft.closed or draft.seats <= 0:
                if not paused:
                    return
            elif seq.awaits is not None and sweeps.promises(seq.awaits):
                continue
            elif not only_small or self._may_be_small(seq):
                match = self._kv.lookup(seq.chain)
                if not self._waits(seq, match.blocks, draft, sweeps):
                    size = len(seq.tokens) - match.tokens
                    yield Candidate(seq, match.tokens, size, match.needs)

    def _may_be_small(self, seq: Sequence) -> bool:
        over = len(seq.tokens) - self.small
        return self._kv.may_reuse(seq.chain, -(-over // self._kv.block_size))

    def _waits(self, seq: Sequence, cached: int, draft: Draft, sweeps: Sweeps) -> bool:
        """True when a sweep on its way, or the one being chosen, computes much of this prompt.

        Much is half of what it would compute: a few blocks are not worth the wait.
        """
        keys, known = seq.chain.keys, cached
        while known < seq.chain.reusable and (
            sweeps.promises(keys[known]) or keys[known] in draft.promised
        ):
            known += 1
        size = self._kv.block_size
        if 2 * (known - cached) * size < max(1, len(seq.tokens) - cached * size):
            return False
        seq.awaits = keys[cached]
        return True


def small_tokens(window: int) -> int:
    """Most tokens of a small sweep, which may overtake, when a large one has up to `window`."""
    return min(window, max(SMALL_TOKENS, window // SMALL_PART))
