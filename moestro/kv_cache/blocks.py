"""The pool of block numbers: who is counted in, and in what order free ones are taken.

Owns: reference counts and the order of free blocks. Does not own: what a block holds
(`kv_cache.prefix`) or which sequence holds it (`kv_cache.manager`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class BlockPool:
    """`total` blocks, numbered from 0, each free or held by one or more owners.

    Free blocks are of two sorts: empty ones, taken first, and cached ones, whose content may be
    asked for again; of those the one freed longest ago is taken first.
    """

    def __init__(self, total: int) -> None:
        assert total > 0, total
        self._owners = [0] * total
        self._empty = list(range(total - 1, -1, -1))  # a stack: low numbers leave first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return len(self._owners)

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._empty) + len(self._cached)

    @property
    def cached(self) -> int:
        """Free blocks whose content is kept until they are taken."""
        return len(self._cached)

    def is_free(self, block: int) -> bool:
        """True when nobody holds `block`."""
        return not self._owners[block]

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks to one owner each; what they held is lost."""
        assert count <= self.free, (count, self.free)
        taken = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._cached.popitem(last=False)[0]
            self._owners[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """Count one more owner of `block`, which is held already or free and cached."""
        if not self._owners[block]:
            del self._cached[block]
        self._owners[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Count one owner less; the last one leaves the block cached if `keep`, else empty."""
        assert self._owners[block] > 0, block
        self._owners[block] -= 1
        if self._owners[block]:
            return
        if keep:
            self._cached[block] = None
        else:
            self._empty.append(block)

    def cached_blocks(self) -> Iterator[int]:
        """The free blocks with content, in the order in which they will be taken."""
        return iter(self._cached)

    def check(self, owners: dict[int, int]) -> None:
        """Raise AssertionError unless the counts equal `owners` and every block is in one place."""
        held = {block: count for block, count in enumerate(self._owners) if count}
        assert held == owners, f"owners {held} != {owners}"
        free = [*self._empty, *self._cached]
        assert len(set(free)) == len(free), "a block is free twice"
        assert not set(free) & set(held), "a block is free and held"
        assert len(free) + len(held) == self.total, "used + free != total"
