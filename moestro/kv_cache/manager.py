"""Which sequence holds which blocks: the scheduler's only view of the KV cache.

Owns: block tables, when a block is published for reuse and when one is given back. Does not own:
tensors (`kv_cache.storage`), which layers share a table (`kv_cache.groups`), or who is admitted and
who gives way (`scheduler`).

A shared block is always full and computed, so nobody ever writes to one.

A sequence has a table for each group of layers. Where these see a window only, blocks wholly before
it are given back as soon as they are computed past, and while the prompt is not done as many are
taken at its other end: a prompt never waits for blocks once it has started. So that this cannot
fail, a block of such a table counts as often as it is held, as if nobody shared it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moestro.kv_cache.blocks import BlockPool
from moestro.kv_cache.groups import UNLIMITED, LayerGroups, one_group
from moestro.kv_cache.prefix import GONE, Chain, Digest, Entry, PrefixIndex, digest256
from moestro.stats import KVStats

Table = tuple[int, ...]  # blocks in order; GONE where one was given back


@dataclass(frozen=True, slots=True)
class Match:
    """What starting a chain now would reuse and cost."""

    blocks: int  # leading blocks that are in the cache
    tokens: int  # the same in tokens
    needs: int  # blocks that would no longer be free: new ones and cached free ones


@dataclass(slots=True, eq=False)
class _Tables:
    """The blocks of one sequence."""

    salt: str | None
    keys: list[bytes]  # of its full blocks as far as they are known
    lines: list[list[int]]  # for each group of layers its blocks in order, or GONE
    given: list[int]  # for each group how many of the first blocks are not held
    prompt: int  # blocks of the tokens that it started with
    views: tuple[Table, ...] | None  # `lines` as handed out, until they change
    published: int  # leading blocks that are in the index, or that lost to an equal one
    last: Entry | None  # the entry of block number published - 1, pinned
    publishing: bool


class KVManager:
    """Blocks of `spec_block_size` tokens for every sequence that runs.

    `groups`: of the model's layers; without it one that keeps all. At most `run` tokens of a
    prompt are computed together.
    """

    def __init__(
        self,
        spec_block_size: int,
        blocks: int,
        *,
        prefix_caching: bool,
        digest: Digest = digest256,
        groups: LayerGroups | None = None,
        run: int = UNLIMITED,
    ) -> None:
        assert spec_block_size > 0, spec_block_size
        self._size = spec_block_size
        self._caching = prefix_caching
        self._groups = groups or one_group(spec_block_size)
        self._kinds = self._groups.kinds
        self._windowed = [g for g, kind in enumerate(self._kinds) if not kind.keeps_all]
        self._run = run
        self._pool = BlockPool(blocks)
        self._index = PrefixIndex(spec_block_size, digest)
        self._tables: dict[str, _Tables] = {}
        self._again = 0  # windowed blocks counted once for each of their owners but the first
        self._queries = 0
        self._hits = 0

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return self._size

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the whole pool holds."""
        return self._groups.longest(self._pool.total, self._run)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had, cached ones included."""
        return self._pool.free - self._again

    @property
    def growth(self) -> int:
        """Blocks that a sequence takes when it grows by a block of tokens."""
        return len(self._kinds)

    def chain(self, tokens: tuple[int, ...], salt: str | None, *, reuse: bool = True) -> Chain:
        """Hash `tokens` once, for `lookup` and `start`. With `reuse` off everything is computed."""
        if not self._caching:
            return Chain(tokens, salt, (), False, 0)
        reusable = (len(tokens) - 1) // self._size if reuse else 0
        return Chain(tokens, salt, self._index.keys(tokens, salt), reuse, reusable)

    def lookup(self, chain: Chain) -> Match:
        """What `start` would reuse and need now. Changes nothing."""
        found = self._match(chain)
        return Match(len(found), len(found) * self._size, self._needs(chain, found))

    def may_reuse(self, chain: Chain, blocks: int) -> bool:
        """False when `lookup` certainly finds fewer than `blocks` blocks; costs one dict access."""
        if blocks <= 0:
            return True
        return blocks <= chain.reusable and self._index.has_key(chain.keys[blocks - 1])

    def start(self, seq_id: str, chain: Chain) -> int | None:
        """Give `seq_id` blocks for its first run at least, and wherever all tokens are kept for all
        of `chain`; return how many tokens are there already.

        None, and nothing has changed, when it does not fit.
        """
        assert seq_id not in self._tables, seq_id
        found = self._match(chain)
        if self._needs(chain, found) > self.free_blocks:
            return None
        spans = self._spans(chain, found)
        lines = [[GONE] * first for first, _ in spans]
        for group, (first, _) in enumerate(spans):  # before new ones are taken, maybe these
            for entry in found[first:]:
                self._share(group, entry.blocks[group])
                lines[group].append(entry.blocks[group])
        for line, (_, end) in zip(lines, spans, strict=True):
            line += self._take(end - len(line))
        last = found[-1] if found else None
        if last is not None:
            self._index.pin(last)
        self._tables[seq_id] = _Tables(
            salt=chain.salt,
            keys=list(chain.keys),
            lines=lines,
            given=[first for first, _ in spans],
            prompt=self._blocks_for(len(chain.tokens)),
            views=None,
            published=len(found),
            last=last,
            publishing=self._caching,
        )
        if chain.reuse:
            self._queries += len(chain.tokens)
            self._hits += len(found) * self._size
        return len(found) * self._size

    def grow(self, seq_id: str, length: int) -> bool:
        """Make room for `length` tokens in all. False, and nothing has changed, if none is left."""
        tables = self._tables[seq_id]
        wanted = self._blocks_for(length)
        missing = [max(0, wanted - len(line)) for line in tables.lines]
        if not any(missing):
            return True
        if sum(missing) > self.free_blocks:
            return False
        for line, count in zip(tables.lines, missing, strict=True):
            line += self._take(count)
        tables.views = None
        return True

    def table(self, seq_id: str) -> Table:
        """The blocks of `seq_id` in the first group; the same object until they change."""
        return self._views(seq_id)[0]

    def further_tables(self, seq_id: str) -> tuple[Table, ...]:
        """The blocks of `seq_id` in all other groups."""
        return self._views(seq_id)[1:]

    def commit(self, seq_id: str, tokens: Sequence[int], computed: int) -> None:
        """The first `computed` of `tokens` are in the cache now: publish the blocks they fill, and
        give back what is not looked at any more."""
        tables = self._tables[seq_id]
        if tables.publishing and computed // self._size > tables.published:
            assert computed <= len(tokens), (computed, len(tokens))
            for number in range(tables.published, computed // self._size):
                if not self._publish(tables, number, tokens):
                    break
        for group in self._windowed:
            self._move_on(tables, group, computed)

    def free(self, seq_id: str) -> None:
        """Give back all blocks of `seq_id`."""
        tables = self._tables.pop(seq_id)
        for group, line in enumerate(tables.lines):
            for block in reversed(line):  # the tail is taken first, the prefix lives longest
                if block != GONE:
                    self._release(group, block)
        if tables.last is not None:
            self._index.unpin(tables.last)

    def holders(self) -> set[str]:
        """The sequences that hold blocks."""
        return set(self._tables)

    def stats(self) -> KVStats:
        """A snapshot."""
        return KVStats(
            block_size=self._size,
            blocks=self._pool.total,
            blocks_used=self._pool.total - self._pool.free,
            blocks_cached=self._pool.cached,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
        )

    def check(self) -> None:
        """Raise AssertionError unless tables, counts, free list and index agree."""
        owners: Counter[int] = Counter()
        groups: dict[int, int] = {}
        for name, tables in self._tables.items():
            for group, line in enumerate(tables.lines):
                held = line[tables.given[group] :]
                assert GONE not in held, f"{name} lacks a block"
                assert set(line[: tables.given[group]]) <= {GONE}, f"{name} has a block too many"
                assert len(set(held)) == len(held), f"{name} holds a block twice"
                owners.update(held)
                for block in held:
                    assert groups.setdefault(block, group) == group, f"{block} serves two groups"
            views = tables.views or tuple(map(tuple, tables.lines))
            assert list(map(list, views)) == tables.lines, f"{name}: stale view"
        self._pool.check(dict(owners))
        self._index.check()
        indexed, cached = set(self._index.blocks()), set(self._pool.cached_blocks())
        assert cached == indexed - set(owners), "the free blocks with content are not the indexed"
        again = sum(n - 1 for block, n in owners.items() if groups[block] in self._windowed)
        assert self._again == again <= self._pool.free, (self._again, again, self._pool.free)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _match(self, chain: Chain) -> list[Entry]:
        """The longest beginning of `chain` of which every group has all that is looked at."""
        found, size = self._index.match(chain), self._size
        for group, kind in enumerate(self._kinds):
            if kind.keeps_all:
                lost = (n for n, entry in enumerate(found) if entry.blocks[group] == GONE)
                del found[next(lost, len(found)) :]
        if not self._windowed:
            return found
        usable = [True] * (len(found) + 1)
        for group in self._windowed:
            start = 0  # of the unbroken blocks before number n
            for n, entry in enumerate(found, 1):
                start = n if entry.blocks[group] == GONE else start
                usable[n] &= start <= self._kinds[group].seen_from(n * size) // size
        return found[: max(n for n, ok in enumerate(usable) if ok)]

    def _spans(self, chain: Chain, found: list[Entry]) -> list[tuple[int, int]]:
        """For each group the first block to be held and the one after the last."""
        computed, spans = len(found) * self._size, []
        for kind in self._kinds:
            first = kind.seen_from(computed) // self._size
            left = len(chain.tokens) - first * self._size
            spans.append((first, first + kind.most_blocks(left, self._run)))
        return spans

    def _needs(self, chain: Chain, found: list[Entry]) -> int:
        needs = 0
        for group, (first, end) in enumerate(self._spans(chain, found)):
            needs += end - first
            if self._kinds[group].keeps_all:
                needs -= sum(not self._pool.is_free(entry.blocks[group]) for entry in found)
        return needs

    def _views(self, seq_id: str) -> tuple[Table, ...]:
        tables = self._tables[seq_id]
        if tables.views is None:
            tables.views = tuple(map(tuple, tables.lines))
        return tables.views

    def _take(self, count: int) -> list[int]:
        taken = self._pool.take(count)
        for block in taken:
            self._index.forget(block)
        return taken

    def _share(self, group: int, block: int) -> None:
        if not self._kinds[group].keeps_all and not self._pool.is_free(block):
            self._again += 1
        self._pool.share(block)

    def _release(self, group: int, block: int) -> None:
        self._pool.release(block, keep=self._index.has_block(block))
        if not self._kinds[group].keeps_all and not self._pool.is_free(block):
            self._again -= 1

    def _move_on(self, tables: _Tables, group: int, computed: int) -> None:
        """Give back what no token from position `computed` on sees, and take as many for what is
        left of the prompt."""
        line, given = tables.lines[group], tables.given[group]
        first = self._kinds[group].seen_from(computed) // self._size
        if first <= given:
            return
        for number in range(given, first):
            self._release(group, line[number])
            line[number] = GONE
        tables.given[group] = first
        line += self._take(max(0, min(first - given, tables.prompt - len(line))))
        tables.views = None

    def _publish(self, tables: _Tables, number: int, tokens: Sequence[int]) -> bool:
        size = self._size
        content = tuple(tokens[number * size : (number + 1) * size])
        if number == len(tables.keys):
            before = tables.keys[-1] if tables.keys else self._index.root(tables.salt)
            tables.keys.append(self._index.extend(before, content))
        blocks = [line[number] for line in tables.lines]
        known = self._index.publish(
            Entry(tables.keys[number], tables.last, tables.salt, content, blocks)
        )
        tables.published = number + 1
        tables.publishing = known is not None
        if known is not None:
            self._index.pin(known)
            if tables.last is not None:
                self._index.unpin(tables.last)
            tables.last = known
        return tables.publishing
