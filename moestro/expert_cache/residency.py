"""Decides which experts stay in slots. Used by the cache and by the replay of traces alike.

Owns: the clock, the admission rules, and the slot table that they act on. Does not own memory,
transfers or what a policy has learned. No torch. One thread uses it.

**Admission.** A missing expert takes a free slot if there is one. Otherwise it takes the slot of
the first victim in the policy's order, if the policy admits it, among the slots that hold an
expert which this layer does not want and nobody has pinned. Two rules are above the policy:

1. *Crowded*: when the last pass over the layers, or the present one so far, wants more experts
   than there are slots, an expert used in either of these two passes is no victim. A working set
   that cannot fit thus keeps the part of it that is resident (a cyclic scan of W experts over C
   slots hits C / W, where plain LRU hits nothing), while experts that fell out of use are still
   replaced. A `steady` policy does better by itself, and is left to it.
2. *Sweep*: prompt tokens want most experts of every layer once. Whatever rule 1 says, experts of
   these two passes are no victims, and a layer admits only its busiest experts, as many as its
   share of the slots. A prompt thus neither flushes the decode working set nor fills the slots
   with the first layers only, and what it does admit is what its own routing used most.

What is not admitted goes through a staging slot and is forgotten.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

import numpy as np

from moestro.errors import ConfigError
from moestro.expert_cache.policy import Bools, Floats, Ints, Policy
from moestro.expert_cache.slot_table import SlotTable

Kind = Literal["decode", "sweep"]

STAGE = -1  # in place of a slot: not admitted
NOBODY = -1  # in place of a key: nobody was evicted

TOLD = 8  # passes that a new policy hears of
_IDLE = 2  # passes; an expert used more recently is no victim under rules 1 and 2
_NEVER = -(1 << 40)
_CHURN = 0.05  # weight of the newest pass in the mean share of slots that change hands in one


class Placement(NamedTuple):
    """Where one missing expert goes: a reserved cache slot, or `STAGE`."""

    expert: int
    key: int
    slot: int
    evicted: int  # key that left the slot, or NOBODY


class Residency:
    """Slots of all layers, shared, under one policy."""

    def __init__(self, layers: int, experts: int, slots: int, staging: int, policy: Policy) -> None:
        if layers < 1 or experts < 1:
            raise ConfigError(f"{layers} layers of {experts} experts leave nothing to cache")
        self.layers = layers
        self.experts = experts
        self.policy = policy
        self.table = SlotTable(layers, experts, slots, staging)
        self.clock = 0
        self.evictions = 0
        self._complete = self.table.cache_slots >= layers * experts
        self._share = -(-self.table.cache_slots // layers)
        self._sweeping = False
        self._used = np.full(layers * experts, _NEVER, np.int64)  # pass of the last use
        self._used_rows = tuple(self._used.reshape(layers, experts))
        self._visited = [_NEVER] * layers  # pass of the last visit
        self._wanted = 0  # distinct experts in this pass, so far
        self._wanted_before = 0  # and in the one before
        self._evictions_before = 0  # up to the last pass
        self._churn = 0.0  # share of the slots that change hands in a pass

    def change_policy(self, policy: Policy) -> None:
        """Go on under `policy`. Who is in a slot stays; the new policy is told of them in the order
        of the old one, so that it does not begin with a guess."""
        held = self.table.owner[self.table.owner >= 0]
        order = held[self.policy.rank(held, self.clock)]
        for part in range(TOLD):
            kept = order[len(order) * part // TOLD :]
            if len(kept):
                policy.touch_pass(kept, np.ones(len(kept), np.int64), self.clock)
        self.policy = policy

    @property
    def learning(self) -> bool:
        """The policy is told of uses. Where everything fits, a steady one has nothing to decide."""
        return not (self.policy.steady and self._complete)

    @property
    def crowded(self) -> bool:
        """Rule 1 holds."""
        return max(self._wanted, self._wanted_before) > self.table.cache_slots

    def begin_pass(self, kind: Kind = "decode", *, resumed: bool = False) -> None:
        """A new pass over the layers starts, or an interrupted one goes on (`resumed`)."""
        self._sweeping = kind == "sweep"
        if not resumed:
            self.clock += 1
            self._wanted_before = self._wanted
            self._wanted = 0
            changed = (self.evictions - self._evictions_before) / max(1, self.table.cache_slots)
            self._churn += _CHURN * (changed - self._churn)
            self._evictions_before = self.evictions

    def loss(self, keys: Ints, in_slots: int) -> Floats:
        """Reads from disk a pass if host memory lost its copies of `keys`: one for each use, or for
        the first `in_slots` of them, which sit in slots, one each time that they leave theirs."""
        rate = 1.0 / (1 + self.clock - self._used[keys])
        np.minimum(rate[:in_slots], self._churn, out=rate[:in_slots])
        return rate

    def want(self, layer: int, counts: Ints, gates: Floats | None) -> tuple[Ints, Ints]:
        """Record that a layer uses the experts with a count; returns them and their slots.

        `counts` and `gates` are [experts]. A slot below 0 is a miss, to be given to `place`.
        """
        experts = counts.nonzero()[0]
        used = self._used_rows[layer]
        clock = self.clock
        if self._visited[layer] == clock:
            self._wanted += int(np.count_nonzero(used[experts] != clock))
        else:
            self._visited[layer] = clock
            self._wanted += len(experts)
        used[experts] = clock
        shares = None if gates is None else gates[experts]
        if self.learning:
            self.policy.touch(layer, experts, counts[experts], shares, clock)
        return experts, self.table.rows[layer][experts]

    def want_all(self, counts: Ints) -> Ints:
        """Record a whole pass at once, after it ran: `counts` [layers * experts] are its tokens per
        expert. Returns how many experts each layer wanted."""
        keys = counts.nonzero()[0]
        self._visited = [self.clock] * self.layers
        self._wanted = len(keys)
        self._used[keys] = self.clock
        if self.learning:
            self.policy.touch_pass(keys, counts[keys], self.clock)
        return np.bincount(keys // self.experts, minlength=self.layers)

    def idle(self, keys: Ints, passes: int) -> Bools:
        """Which of `keys` this many passes have not used."""
        idle: Bools = self.clock - self._used[keys] >= passes
        return idle

    def place(self, layer: int, missing: Ints, counts: Ints) -> list[Placement]:
        """Reserve a slot for each missing expert that is admitted, busiest first.

        `counts` [experts] are those of the whole layer, of which these experts may be a part; none
        that it wants is evicted. The slots of the others of this part must be pinned before.
        """
        victims: deque[int] | None = None
        barred = self._barred(counts)
        placements = []
        for expert in missing[np.argsort(-counts[missing], kind="stable")].tolist():
            key = layer * self.experts + expert
            slot, evicted = STAGE, NOBODY
            if expert not in barred:
                free = self.table.reserve()
                if free is not None:
                    slot = free
                else:
                    if victims is None:
                        victims = self._victims(layer, counts, len(missing))
                    slot, evicted = self._displace(key, victims)
            placements.append(Placement(expert, key, slot, evicted))
        return placements

    def fill_order(self, host: int) -> list[int]:
        """All keys in the order in which to fill empty tiers: those most worth having first, as
        the policy sees it. The lower tier holds `host`.

        Where the policy has no preference each layer gets its share of both tiers, and they come
        layer by layer: as sweeps need them, and as they lie on the disk.
        """
        shape = self.layers, self.experts
        keys = np.arange(self.layers * self.experts).reshape(shape).T.ravel()[::-1]
        rank = self.policy.rank(keys, self.clock)
        order: list[int] = keys[rank][::-1].tolist()
        if (rank != np.arange(len(keys))).any():
            return order
        slots = self.table.cache_slots
        both = slots + host
        return sorted(order[:slots]) + sorted(order[slots:both]) + order[both:]

    def _barred(self, counts: Ints) -> frozenset[int]:
        """Experts that rule 2 does not let in."""
        if not self._sweeping or self._share >= self.experts:
            return frozenset()
        return frozenset(np.argsort(-counts, kind="stable")[self._share :].tolist())

    def _victims(self, layer: int, counts: Ints, most: int) -> deque[int]:
        """Slots that may be taken, first to leave first."""
        slots = self.table.evictable()
        keys = self.table.owner[slots]
        owners, experts = np.divmod(keys, self.experts)
        spare = (owners != layer) | (counts[experts] == 0)
        if self._sweeping or (self.crowded and not self.policy.steady):
            spare &= self.clock - self._used[keys] >= _IDLE
        slots, keys = slots[spare], keys[spare]
        if not len(slots):
            return deque()
        return deque(slots[self.policy.rank(keys, self.clock)[:most]].tolist())

    def _displace(self, key: int, victims: deque[int]) -> tuple[int, int]:
        """Take the first victim's slot, if the policy finds `key` more worthy."""
        if not victims:
            return STAGE, NOBODY
        slot = victims[0]
        if not self.policy.admit(key, int(self.table.owner[slot]), self.clock):
            return STAGE, NOBODY
        victims.popleft()
        self.evictions += 1
        return slot, self.table.evict(slot)
