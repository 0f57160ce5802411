"""Kinds of layer memory, what a block of each costs and which blocks a sequence needs.

Owns: sizes and what is looked at. Does not own: tensors (`kv_cache.storage`), which block is whose
(`kv_cache.manager`) or which layers share blocks (`kv_cache.groups`). A new kind of memory
(latent, windowed, recurrent) is a new class that satisfies `LayerMemory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self


class LayerMemory(Protocol):
    """What every kind of paged layer memory can say about itself."""

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        ...

    @property
    def layers(self) -> int:
        """Layers of this kind."""
        ...

    @property
    def entry(self) -> tuple[int, ...]:
        """Shape of what one token leaves in one layer."""
        ...

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of this kind together."""
        ...

    @property
    def keeps_all(self) -> bool:
        """Nothing is given back before the sequence ends."""
        ...

    def seen_from(self, position: int) -> int:
        """The first position that attention at `position` looks at."""
        ...

    def most_blocks(self, tokens: int, run: int) -> int:
        """Blocks that a sequence of `tokens` tokens has at most at a time, when at most `run`
        prompt tokens are computed together."""
        ...

    def kept(self) -> LayerMemory:
        """The same for who gives nothing back early."""
        ...


class _KeepsAll:
    """What is the same for every kind that keeps all tokens of a sequence."""

    __slots__ = ()
    block_size: int

    @property
    def keeps_all(self) -> bool:
        """See `LayerMemory`."""
        return True

    def seen_from(self, position: int) -> int:
        """See `LayerMemory`."""
        return 0

    def most_blocks(self, tokens: int, run: int) -> int:
        """See `LayerMemory`."""
        return -(-tokens // self.block_size)

    def kept(self) -> Self:
        """See `LayerMemory`."""
        return self


@dataclass(frozen=True, slots=True)
class PagedKV(_KeepsAll):
    """Keys and values of full attention: two vectors per layer, head and token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int  # tokens

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "dtype_bytes", "block_size"):
            assert getattr(self, name) > 0, name

    @property
    def entry(self) -> tuple[int, ...]:
        """One token in one layer: [2, kv_heads, head_dim], keys first."""
        return 2, self.kv_heads, self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return self.token_bytes * self.block_size

    def blocks_in(self, size: int) -> int:
        """How many whole blocks fit in `size` bytes."""
        return size // self.block_bytes


@dataclass(frozen=True, slots=True)
class WindowKV:
    """Keys and values of attention that looks at a token and the `window` - 1 before it. Blocks
    that are wholly before that are given back."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int  # tokens
    window: int  # tokens

    def __post_init__(self) -> None:
        assert self.window > 0, self.window

    @property
    def entry(self) -> tuple[int, ...]:
        """One token in one layer, as in `PagedKV`."""
        return self.kept().entry

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return self.kept().block_bytes

    @property
    def keeps_all(self) -> bool:
        """See `LayerMemory`."""
        return False

    def seen_from(self, position: int) -> int:
        """See `LayerMemory`."""
        return max(0, position - self.window + 1)

    def most_blocks(self, tokens: int, run: int) -> int:
        """See `LayerMemory`. A run is written whole, and its first token sees a window before it;
        both may begin in the middle of a block."""
        size = self.block_size
        return min(-(-tokens // size), -(-(run + self.window) // size) + 1)

    def kept(self) -> PagedKV:
        """See `LayerMemory`."""
        sizes = self.layers, self.kv_heads, self.head_dim, self.dtype_bytes, self.block_size
        return PagedKV(*sizes)


@dataclass(frozen=True, slots=True)
class LatentKV(_KeepsAll):
    """Multi-head latent attention (arXiv 2405.04434): for each layer and token one vector of
    `rank` that keys and values of all heads come from, and one rotated key of `rotated` that all
    heads share. There are no keys and values of single heads."""

    layers: int
    rank: int
    rotated: int
    dtype_bytes: int
    block_size: int  # tokens

    def __post_init__(self) -> None:
        for name in ("layers", "rank", "rotated", "dtype_bytes", "block_size"):
            assert getattr(self, name) > 0, name

    @property
    def entry(self) -> tuple[int, ...]:
        """One token in one layer: [rank + rotated], the latent vector first."""
        return (self.rank + self.rotated,)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers together."""
        return self.layers * (self.rank + self.rotated) * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return self.token_bytes * self.block_size
