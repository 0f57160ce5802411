"""The tensors through which the host, `acquire`, `fetch` and the expert kernels talk.

Owns: their names, shapes and dtypes, and how to allocate them. Does not own: their contents; the
host fills `CacheTables` between steps, `acquire` and `fetch` change them within one.

L MoE layers, E experts of a layer, key = layer * E + expert. P routes of a step, a route being row
* K + k. G = min(E, P), the most experts that a layer can need. A slot is a row of the slab; slots
0 .. S-1 are the cache's, S .. S+R-1 are the ring's, which every layer starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class Fault(IntEnum):
    """Why a layer could not get its experts. A step with a fault has no valid result."""

    NONE = 0
    NOT_IN_HOST_MEMORY = 1
    NO_SLOT = 2
    NO_ANSWER = 3  # the host's processor did not compute its share in time


@dataclass(frozen=True, slots=True)
class CacheTables:
    """Which expert is where. Entries of `victims` are distinct."""

    slot_of: torch.Tensor  # int32 [L * E]: slot of a key, -1 when it is in none
    owner: torch.Tensor  # int32 [S]: key in a slot, -1 when free
    source: torch.Tensor  # int64 [L * E]: host address of a key's blob, 0 when not in host memory
    admit: torch.Tensor  # uint8 [L * E]: whether a missed key may take a cache slot
    victims: torch.Tensor  # int32 [V]: slots to take, in this order and then from the beginning
    cursor: torch.Tensor  # int32 [2]: next index into victims, how many of them count
    fault: torch.Tensor  # int32 [2]: a Fault and its layer; the first one stays
    share: torch.Tensor  # int32 [E + 1]: of so many missing experts, how many the CPU computes
    slots: int  # S
    ring: int  # R
    experts: int  # E

    @classmethod
    def empty(
        cls,
        layers: int,
        experts: int,
        *,
        slots: int,
        ring: int,
        victims: int,
        device: torch.device | str,
    ) -> CacheTables:
        """Tables of a cache that holds nothing, admits all and has an empty list of victims."""
        keys = layers * experts
        return cls(
            slot_of=torch.full((keys,), -1, dtype=torch.int32, device=device),
            owner=torch.full((slots,), -1, dtype=torch.int32, device=device),
            source=torch.zeros(keys, dtype=torch.int64, device=device),
            admit=torch.ones(keys, dtype=torch.uint8, device=device),
            victims=torch.full((victims,), -1, dtype=torch.int32, device=device),
            cursor=torch.zeros(2, dtype=torch.int32, device=device),
            fault=torch.zeros(2, dtype=torch.int32, device=device),
            share=torch.zeros(experts + 1, dtype=torch.int32, device=device),
            slots=slots,
            ring=ring,
            experts=experts,
        )


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer has to copy and compute. One is enough for all layers, one after another."""

    n_groups: torch.Tensor  # int32 [1]: experts that are needed
    group_slot: torch.Tensor  # int32 [G]: where each is, ascending by expert; -1: left to the CPU
    group_lo: torch.Tensor  # int32 [G + 1]: its routes are order[group_lo[i]:group_lo[i + 1]]
    order: torch.Tensor  # int32 [P]: routes by expert, then by number; those without one last
    n_jobs: torch.Tensor  # int32 [1]: blobs to copy
    job_slot: torch.Tensor  # int32 [G]: where to
    job_src: torch.Tensor  # int64 [G]: host address where from
    taken: torch.Tensor  # int32 [G]: scratch of acquire, the victims that it takes
    n_cpu: torch.Tensor  # int32 [1]: experts that are left to the CPU
    cpu_src: torch.Tensor  # int64 [G]: host address of each
    cpu_start: torch.Tensor  # int32 [G]: where its routes begin in `order`
    cpu_lo: torch.Tensor  # int32 [G + 1]: where they begin in `cpu_route`
    cpu_route: torch.Tensor  # int32 [P]: the routes left to the CPU, written by `cpu_share.post`

    @classmethod
    def empty(cls, experts: int, routes: int, device: torch.device | str) -> LayerWork:
        """Room for `routes` = B * K routes over `experts` experts."""
        groups = min(experts, routes)
        return cls(
            n_groups=torch.zeros(1, dtype=torch.int32, device=device),
            group_slot=torch.zeros(groups, dtype=torch.int32, device=device),
            group_lo=torch.zeros(groups + 1, dtype=torch.int32, device=device),
            order=torch.zeros(routes, dtype=torch.int32, device=device),
            n_jobs=torch.zeros(1, dtype=torch.int32, device=device),
            job_slot=torch.zeros(groups, dtype=torch.int32, device=device),
            job_src=torch.zeros(groups, dtype=torch.int64, device=device),
            taken=torch.zeros(groups, dtype=torch.int32, device=device),
            n_cpu=torch.zeros(1, dtype=torch.int32, device=device),
            cpu_src=torch.zeros(groups, dtype=torch.int64, device=device),
            cpu_start=torch.zeros(groups, dtype=torch.int32, device=device),
            cpu_lo=torch.zeros(groups + 1, dtype=torch.int32, device=device),
            cpu_route=torch.zeros(routes, dtype=torch.int32, device=device),
        )

    @property
    def groups(self) -> int:
        """G, the most groups that there can be."""
        return self.group_slot.shape[0]

    @property
    def routes(self) -> int:
        """P."""
        return self.order.shape[0]


@dataclass(frozen=True, slots=True)
class StepLog:
    """What a step fetched, for the host to read after it. A layer's times are valid only when it
    had misses and was timed; they are in ns of the GPU's global timer."""

    n_jobs: torch.Tensor  # int32 [L]
    job_key: torch.Tensor  # int32 [L, G]
    job_slot: torch.Tensor  # int32 [L, G]
    n_cpu: torch.Tensor  # int32 [L]: experts that were left to the CPU
    started: torch.Tensor  # int64 [L]: the misses were known
    ended: torch.Tensor  # int64 [L]: the jobs were done
    waiting: torch.Tensor  # int64 [L]: nothing else was left than to wait for the CPU
    answered: torch.Tensor  # int64 [L]: the CPU's share was seen to be done
    spent: torch.Tensor  # int32 [L]: ns that the CPU took for it by its own clock

    @classmethod
    def empty(cls, layers: int, groups: int, device: torch.device | str) -> StepLog:
        """A log in which no layer fetched anything."""
        return cls(
            n_jobs=torch.zeros(layers, dtype=torch.int32, device=device),
            job_key=torch.full((layers, groups), -1, dtype=torch.int32, device=device),
            job_slot=torch.full((layers, groups), -1, dtype=torch.int32, device=device),
            n_cpu=torch.zeros(layers, dtype=torch.int32, device=device),
            started=torch.zeros(layers, dtype=torch.int64, device=device),
            ended=torch.zeros(layers, dtype=torch.int64, device=device),
            waiting=torch.zeros(layers, dtype=torch.int64, device=device),
            answered=torch.zeros(layers, dtype=torch.int64, device=device),
            spent=torch.zeros(layers, dtype=torch.int32, device=device),
        )
