"""Which layers share a table of blocks, so that layers of different kinds share one pool.

Owns: the division of a model's layers into groups, and the arithmetic of blocks for all of them. A
sequence has one table of blocks for each group. Every block has room for the same number of layers
and may serve any group: what windowed layers give back, full layers can take, and a pool has one
number of free blocks. Does not own: who holds which block (`kv_cache.manager`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moestro.kv_cache.spec import LayerMemory, PagedKV

MOST_GROUPS = 8  # each costs a table a sequence, kept and sent with every step
UNLIMITED = 1 << 40  # tokens: more than any sequence has


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one kind, at most as many as fit into a block."""

    memory: LayerMemory  # of one of its layers
    layers: tuple[int, ...]  # of the model


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """All layers of a model. `depth` is how many layers a block has room for."""

    groups: tuple[Group, ...]
    depth: int

    @property
    def block(self) -> LayerMemory:
        """What one block is, whichever group it serves."""
        return replace(self.groups[0].memory, layers=self.depth)  # type: ignore[type-var]

    @property
    def kinds(self) -> tuple[LayerMemory, ...]:
        """The memory of each group."""
        return tuple(group.memory for group in self.groups)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model its group, and its number among the layers of a block."""
        found = {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in sorted(found))

    def most_blocks(self, tokens: int, run: int) -> int:
        """Blocks that one sequence of `tokens` tokens has at most, as in `LayerMemory`."""
        return sum(kind.most_blocks(tokens, run) for kind in self.kinds)

    def longest(self, blocks: int, run: int) -> int:
        """Tokens of the longest sequence for which `blocks` blocks suffice; `UNLIMITED` when there
        is none."""
        if self.most_blocks(UNLIMITED, run) <= blocks:
            return UNLIMITED
        size, low, high = self.block.block_size, 0, blocks + 1  # blocks of tokens: fits, does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.most_blocks(middle * size, run) <= blocks
            low, high = (middle, high) if fits else (low, middle)
        return low * size


def one_group(block_size: int) -> LayerGroups:
    """A single layer that keeps all, where only numbers of blocks matter."""
    return LayerGroups((Group(PagedKV(1, 1, 1, 1, block_size), (0,)),), 1)


def group_layers(memories: Sequence[LayerMemory]) -> LayerGroups:
    """Divide a model's layers, of which `memories` says the memory of each by itself.

    ValueError when one block cannot serve all of them.
    """
    shapes = {(one.entry, one.dtype_bytes, one.block_size) for one in memories}
    if len(shapes) > 1:
        raise ValueError(f"layers keep their tokens in several shapes: {sorted(shapes)}")
    kinds: dict[LayerMemory, list[int]] = {}
    for layer, memory in enumerate(memories):
        kinds.setdefault(memory, []).append(layer)
    depth = _depth([len(layers) for layers in kinds.values()])
    groups = [
        Group(memory, tuple(layers[lo : lo + depth]))
        for memory, layers in kinds.items()
        for lo in range(0, len(layers), depth)
    ]
    return LayerGroups(tuple(groups), depth)


def _depth(counts: Sequence[int]) -> int:
    """Layers of a block for kinds of so many layers each: with the least room left empty, and then
    the fewest groups."""

    def groups(depth: int) -> int:
        return sum(-(-count // depth) for count in counts)

    few = [depth for depth in range(1, max(counts) + 1) if groups(depth) <= MOST_GROUPS]
    return min(few or [max(counts)], key=lambda depth: (groups(depth) * depth, groups(depth)))
