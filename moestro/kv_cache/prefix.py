"""The prefix index: which block holds the keys and values of which tokens.

Owns: the chain of keys over full blocks and, for each group of layers, the map from key to block.
Does not own: whether a block is held or free (`kv_cache.blocks`), or how many of the blocks before
a token are needed (`kv_cache.manager`).

A key is a 256-bit hash of the previous key and the block's tokens, so equal keys mean equal
prefixes, unless two hashes collide. That is not left to luck: a hit also compares the salt, the
block's tokens and the entry before it, so it is exact whatever the hash function does. Therefore an
entry stays while one after it has a block, though its own blocks are gone: windowed layers need no
more than the last blocks.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

Digest = Callable[[bytes], bytes]
GONE = -1  # in place of a block's number: there is none


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
    """The tokens of one block. Compared by identity: `parent` is the very entry before it."""

    key: bytes
    parent: Entry | None
    salt: str | None
    tokens: tuple[int, ...]
    blocks: list[int]  # that hold them, one for each group of layers, or GONE
    uses: int = 0  # entries after this one, and `pin`s: it stays without blocks of its own

    def holds(self, parent: Entry | None, salt: str | None, tokens: tuple[int, ...]) -> bool:
        """True when this is the block for `tokens` after `parent`."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


class PrefixIndex:
    """Full, computed blocks by key. Every block is in it at most once, and so is every key."""

    def __init__(self, block_size: int, digest: Digest = digest256) -> None:
        self._size = block_size
        self._digest = digest
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, tuple[Entry, int]] = {}  # with the group of layers

    def __len__(self) -> int:
        return len(self._by_key)

    def has_key(self, key: bytes) -> bool:
        """True when a block answers for `key` (its tokens not compared)."""
        return key in self._by_key

    def has_block(self, block: int) -> bool:
        """True when the content of `block` may be asked for."""
        return block in self._by_block

    def is_current(self, entry: Entry) -> bool:
        """True until neither `entry` nor one after it has a block."""
        return self._by_key.get(entry.key) is entry

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
        """The leading entries of `chain`, up to what it may reuse. Some may have lost blocks."""
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
        """Index `entry`, or return the one that already answers for the same content; that takes
        over the blocks which it lacks.

        None when the key stands for other content, or the entry before has left the index.
        """
        if entry.parent is not None and not self.is_current(entry.parent):
            return None
        known = self._by_key.get(entry.key)
        if known is None:
            known = self._by_key[entry.key] = entry
            if entry.parent is not None:
                entry.parent.uses += 1
        elif not known.holds(entry.parent, entry.salt, entry.tokens):
            return None
        for group, block in enumerate(entry.blocks):
            if block != GONE and (known is entry or known.blocks[group] == GONE):
                assert block not in self._by_block, block
                known.blocks[group] = block
                self._by_block[block] = known, group
        return known

    def pin(self, entry: Entry) -> None:
        """Somebody will publish after `entry`: keep it until `unpin`."""
        entry.uses += 1

    def unpin(self, entry: Entry) -> None:
        """The opposite of `pin`."""
        entry.uses -= 1
        self._prune(entry)

    def forget(self, block: int) -> None:
        """The content of `block` is about to be overwritten. Harmless when it is not indexed."""
        entry, group = self._by_block.pop(block, (None, 0))
        if entry is not None:
            entry.blocks[group] = GONE
            self._prune(entry)

    def _prune(self, entry: Entry | None) -> None:
        """Take `entry` out when nobody can need it, and those before it."""
        while entry is not None and not entry.uses and set(entry.blocks) == {GONE}:
            del self._by_key[entry.key]
            entry = entry.parent
            if entry is not None:
                entry.uses -= 1

    def blocks(self) -> Iterator[int]:
        """The indexed blocks."""
        return iter(self._by_block)

    def check(self) -> None:
        """Raise AssertionError unless keys, blocks and hashes agree."""
        after = Counter(id(entry.parent) for entry in self._by_key.values())
        held = 0
        for key, entry in self._by_key.items():
            assert entry.key == key, f"{entry.tokens} is not under its key"
            before = self.root(entry.salt) if entry.parent is None else entry.parent.key
            assert self.extend(before, entry.tokens) == key, f"{entry.tokens} has a wrong key"
            assert entry.parent is None or self.is_current(entry.parent), "an entry has no past"
            assert entry.uses >= after[id(entry)], "an entry could vanish before one after it"
            for group, block in enumerate(entry.blocks):
                if block != GONE:
                    held += 1
                    assert self._by_block.get(block) == (entry, group), f"block {block} is lost"
            assert entry.uses or set(entry.blocks) != {GONE}, "an entry is of no use"
        assert held == len(self._by_block), "a block is published twice"
