"""Which sequence holds which blocks: the scheduler's only view of the KV cache.

Owns: block tables and when a block is published for reuse. Does not own: tensors
(`kv_cache.storage`), or who is admitted and who gives way (`scheduler`).

A shared block is always full and computed, so nobody ever writes to one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moestro.kv_cache.blocks import BlockPool
from moestro.kv_cache.prefix import Chain, Digest, Entry, PrefixIndex, digest256
from moestro.stats import KVStats


@dataclass(frozen=True, slots=True)
class Match:
    """What starting a chain now would reuse and cost."""

    blocks: int  # leading blocks that are in the cache
    tokens: int  # the same in tokens
    needs: int  # blocks that would leave the free list: new ones and cached free ones


@dataclass(slots=True, eq=False)
class _Table:
    """The blocks of one sequence."""

    salt: str | None
    keys: list[bytes]  # of its full blocks as far as they are known
    blocks: list[int]
    view: tuple[int, ...] | None  # `blocks` as handed out, until it changes
    published: int  # leading blocks that are in the index, or that lost to an equal one
    last: Entry | None  # the entry of block number published - 1
    publishing: bool


class KVManager:
    """Blocks of `spec_block_size` tokens for every sequence that runs."""

    def __init__(
        self,
        spec_block_size: int,
        blocks: int,
        *,
        prefix_caching: bool,
        digest: Digest = digest256,
    ) -> None:
        assert spec_block_size > 0, spec_block_size
        self._size = spec_block_size
        self._caching = prefix_caching
        self._pool = BlockPool(blocks)
        self._index = PrefixIndex(spec_block_size, digest)
        self._tables: dict[str, _Table] = {}
        self._queries = 0
        self._hits = 0

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return self._size

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self._pool.total * self._size

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self._pool.free

    def chain(self, tokens: tuple[int, ...], salt: str | None, *, reuse: bool = True) -> Chain:
        """Hash `tokens` once, for `lookup` and `start`. With `reuse` off everything is computed."""
        if not self._caching:
            return Chain(tokens, salt, (), False, 0)
        reusable = (len(tokens) - 1) // self._size if reuse else 0
        return Chain(tokens, salt, self._index.keys(tokens, salt), reuse, reusable)

    def lookup(self, chain: Chain) -> Match:
        """What `start` would reuse and need now. Changes nothing."""
        found = self._index.match(chain)
        return Match(len(found), len(found) * self._size, self._needs(chain, found))

    def may_reuse(self, chain: Chain, blocks: int) -> bool:
        """False when `lookup` certainly finds fewer than `blocks` blocks; costs one dict access."""
        if blocks <= 0:
            return True
        return blocks <= chain.reusable and self._index.has_key(chain.keys[blocks - 1])

    def start(self, seq_id: str, chain: Chain) -> int | None:
        """Give `seq_id` blocks for all of `chain`; return how many tokens are there already.

        None, and nothing has changed, when it does not fit.
        """
        assert seq_id not in self._tables, seq_id
        found = self._index.match(chain)
        if self._needs(chain, found) > self._pool.free:
            return None
        for entry in found:  # before taking new ones, which could take these
            self._pool.share(entry.block)
        fresh = self._take(self._blocks_for(len(chain.tokens)) - len(found))
        self._tables[seq_id] = _Table(
            salt=chain.salt,
            keys=list(chain.keys),
            blocks=[entry.block for entry in found] + fresh,
            view=None,
            published=len(found),
            last=found[-1] if found else None,
            publishing=self._caching,
        )
        if chain.reuse:
            self._queries += len(chain.tokens)
            self._hits += len(found) * self._size
        return len(found) * self._size

    def grow(self, seq_id: str, length: int) -> bool:
        """Make room for `length` tokens in all. False, and nothing has changed, if none is left."""
        table = self._tables[seq_id]
        missing = self._blocks_for(length) - len(table.blocks)
        if missing <= 0:
            return True
        if missing > self._pool.free:
            return False
        table.blocks += self._take(missing)
        table.view = None
        return True

    def table(self, seq_id: str) -> tuple[int, ...]:
        """The blocks of `seq_id` in order; the same object until they change."""
        table = self._tables[seq_id]
        if table.view is None:
            table.view = tuple(table.blocks)
        return table.view

    def commit(self, seq_id: str, tokens: Sequence[int], computed: int) -> None:
        """The first `computed` of `tokens` are in the cache now: publish the blocks they fill."""
        table = self._tables[seq_id]
        if computed // self._size <= table.published or not table.publishing:
            return
        assert computed <= len(tokens), (computed, len(tokens))
        for number in range(table.published, computed // self._size):
            if not self._publish(table, number, tokens):
                return

    def free(self, seq_id: str) -> None:
        """Give back all blocks of `seq_id`."""
        table = self._tables.pop(seq_id)
        for block in reversed(table.blocks):  # the tail is taken first, the prefix lives longest
            self._pool.release(block, keep=self._index.has_block(block))

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
        owners = Counter(block for table in self._tables.values() for block in table.blocks)
        self._pool.check(dict(owners))
        self._index.check()
        indexed, cached = set(self._index.blocks()), set(self._pool.cached_blocks())
        assert cached == indexed - set(owners), "the free blocks with content are not the indexed"
        for name, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"{name} holds a block twice"
            assert table.view is None or list(table.view) == table.blocks, f"{name}: stale view"

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _needs(self, chain: Chain, found: list[Entry]) -> int:
        held = sum(not self._pool.is_free(entry.block) for entry in found)
        return self._blocks_for(len(chain.tokens)) - held

    def _take(self, count: int) -> list[int]:
        taken = self._pool.take(count)
        for block in taken:
            self._index.forget(block)
        return taken

    def _publish(self, table: _Table, number: int, tokens: Sequence[int]) -> bool:
        size = self._size
        content = tuple(tokens[number * size : (number + 1) * size])
        if number == len(table.keys):
            before = table.keys[-1] if table.keys else self._index.root(table.salt)
            table.keys.append(self._index.extend(before, content))
        entry = Entry(table.keys[number], table.last, table.salt, content, table.blocks[number])
        table.last = self._index.publish(entry)
        table.publishing = table.last is not None
        table.published = number + 1
        return table.publishing
