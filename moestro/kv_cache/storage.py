"""The KV pool's memory and the views that layers get.

Owns: one tensor for all layers, block-major so that whole blocks can later be given back. Does
not own: which block belongs to whom (`kv_cache.manager`).

A *row* is one block of one layer: row = block * layers + layer, where `layers` is how many a block
has and `layer` the number among them (`kv_cache.groups`). Steps carry rows of layer 0, and a view
adds its layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from moestro.kv_cache.groups import LayerGroups
from moestro.pages import mapped

HUGE_PAGES_FROM = 8 << 20  # bytes of a pool, which is all in use from the start


class LayerKV:
    """One layer's part of the pool: number `layer` in the blocks of `group`."""

    def __init__(self, pool: torch.Tensor, group: int, layer: int) -> None:
        blocks, layers, self.block_size, *entry = pool.shape
        self.group = group
        self.layer = layer
        self._entry = tuple(entry)
        self.rows = pool.view(blocks * layers, -1)
        self._tokens = pool.view(blocks * layers * self.block_size, -1)

    def write(self, places: torch.Tensor, new: torch.Tensor) -> None:
        """Store new [T, *entry] at `places` [T] = row of layer 0 * block_size + offset in the
        block; `entry` is what `LayerMemory` says."""
        where = places + self.layer * self.block_size
        self._tokens.index_copy_(0, where, new.reshape(new.shape[0], -1))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy of the blocks at `rows` [..., n] (rows of layer 0), laid end to end:
        [..., n * block_size, *entry]."""
        found = self.rows.index_select(0, (rows + self.layer).view(-1))
        return found.view(*rows.shape[:-1], rows.shape[-1] * self.block_size, *self._entry)


class KVStorage:
    """Memory of the KV pool: [blocks, layers, block_size, *entry].

    Blocks never written hold zeros, so that a masked position multiplies to zero and not to NaN.
    """

    def __init__(
        self,
        groups: LayerGroups,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Room for `blocks` blocks, each of which may serve any of `groups`."""
        block = groups.block
        shape = (blocks, block.layers, block.block_size, *block.entry)
        # Filled, not `torch.zeros`, which may leave pages to be found missing under load.
        self.pool = _empty(shape, dtype, torch.device(device)).zero_()
        self.block_size = block.block_size
        self.layers = block.layers
        self.kinds = groups.kinds
        self._views = [LayerKV(self.pool, group, layer) for group, layer in groups.places]

    @property
    def nbytes(self) -> int:
        """Size of the pool."""
        return self.pool.nbytes

    def view(self, layer: int) -> LayerKV:
        """What layer number `layer` may see."""
        return self._views[layer]

    def scrub(self, blocks: Sequence[int]) -> None:
        """Replace what is not finite, before somebody else gets these blocks: a masked NaN is
        still a NaN. Finite contents, such as a shared prefix, stay as they are."""
        rows = list(blocks)
        self.pool[rows] = torch.nan_to_num(self.pool[rows], nan=0.0, posinf=0.0, neginf=0.0)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    # In huge pages: a long context lies in hundreds of blocks all over the pool.
    memory = torch.from_numpy(mapped(prod(shape) * dtype.itemsize, HUGE_PAGES_FROM))
    return memory.view(dtype).view(shape)
