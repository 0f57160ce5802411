"""The prefix index: which block holds the keys and values of which tokens.

Owns: the chain of keys over full blocks and the map from key to block. Does not own: whether a
block is held or free (`kv_cache.blocks`).

A key is a 256-bit hash of the previous key and the block's tokens, so equal keys mean equal
prefixes, unless two hashes collide. That is not left to luck: a hit also compares the salt, the
block's tokens and the entry before it, so it is exact whatever the hash function does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

Digest = Callable[[bytes], bytes]


def digest256(data: bytes) -> bytes:
    """A 256-bit hash."""
    return sha256(data).digest()


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens to run, with the keys of their full blocks (none when prefix caching is off)."""

    tokens: tuple[int, ...]
    salt: str | None
    keys: tuple[bytes, ...]
    reuse: bool
    reusable: int  # leading blocks that may come from the cache; one token is always computed


@dataclass(slots=True, eq=False)
class Entry:
    """One indexed block. Compared by identity: `parent` is the very entry that comes before."""

    key: bytes
    parent: Entry | None
    salt: str | None
    tokens: tuple[int, ...]
    block: int

    def holds(self, parent: Entry | None, salt: str | None, tokens: tuple[int, ...]) -> bool:
        """True when this is the block for `tokens` after `parent`."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


class PrefixIndex:
    """Full, computed blocks by key. Every block is in it at most once, and so is every key."""

    def __init__(self, block_size: int, digest: Digest = digest256) -> None:
        self._size = block_size
        self._digest = digest
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def has_key(self, key: bytes) -> bool:
        """True when a block answers for `key` (its tokens not compared)."""
        return key in self._by_key

    def has_block(self, block: int) -> bool:
        """True when the content of `block` may be asked for."""
        return block in self._by_block

    def is_current(self, entry: Entry) -> bool:
        """True until the block of `entry` is taken for something else."""
        return self._by_block.get(entry.block) is entry

    def root(self, salt: str | None) -> bytes:
        """The key before the first block. No salt and an empty salt are different."""
        # Never by the digest passed in: a weak one is for tests of what tokens can tell apart.
        return digest256(b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass"))

    def extend(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The key of the full block `tokens` after the block with the key `parent`."""
        return self._digest(parent + array("I", tokens).tobytes())

    def keys(self, tokens: Sequence[int], salt: str | None) -> tuple[bytes, ...]:
        """The keys of all full blocks of `tokens`."""
        data = array("I", tokens).tobytes()
        step = self._size * array("I").itemsize  # bytes of a block
        key, keys = self.root(salt), []
        for end in range(step, len(data) + 1, step):
            key = self._digest(key + data[end - step : end])
            keys.append(key)
        return tuple(keys)

    def match(self, chain: Chain) -> list[Entry]:
        """The leading blocks of `chain` that are indexed, up to what it may reuse."""
        size, parent, found = self._size, None, []
        for number in range(chain.reusable):
            entry = self._by_key.get(chain.keys[number])
            tokens = chain.tokens[number * size : (number + 1) * size]
            if entry is None or not entry.holds(parent, chain.salt, tokens):
                break
            found.append(entry)
            parent = entry
        return found

    def publish(self, entry: Entry) -> Entry | None:
        """Index `entry`, or return the one that already answers for the same content.

        None when the key stands for other content, or the entry before has left the index.
        """
        if entry.parent is not None and not self.is_current(entry.parent):
            return None
        known = self._by_key.get(entry.key)
        if known is None:
            assert entry.block not in self._by_block, entry.block
            self._by_key[entry.key] = self._by_block[entry.block] = entry
            return entry
        return known if known.holds(entry.parent, entry.salt, entry.tokens) else None

    def forget(self, block: int) -> None:
        """The content of `block` is about to be overwritten. Harmless when it is not indexed."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_key[entry.key]

    def blocks(self) -> Iterator[int]:
        """The indexed blocks."""
        return iter(self._by_block)

    def check(self) -> None:
        """Raise AssertionError unless keys, blocks and hashes agree."""
        assert len(self._by_key) == len(self._by_block), "a block is published twice"
        for block, entry in self._by_block.items():
            assert entry.block == block, (entry.block, block)
            assert self._by_key.get(entry.key) is entry, f"block {block} is not under its key"
            before = self.root(entry.salt) if entry.parent is None else entry.parent.key
            assert self.extend(before, entry.tokens) == entry.key, f"block {block} has a wrong key"
