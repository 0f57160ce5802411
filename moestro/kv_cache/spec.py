"""Kinds of layer memory and what a block of each costs.

Owns: sizes. Does not own: tensors (`kv_cache.storage`) or which block is whose
(`kv_cache.manager`). A new kind of memory (latent, windowed, recurrent) is a new class that
satisfies `LayerMemory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LayerMemory(Protocol):
    """What every kind of paged layer memory can say about itself."""

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of this kind together."""
        ...


@dataclass(frozen=True, slots=True)
class PagedKV:
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
