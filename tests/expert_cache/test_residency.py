"""The admission rules, whatever the policy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from moestro.errors import ConfigError
from moestro.expert_cache.arena_table import ArenaTable
from moestro.expert_cache.policies import POLICIES, make_policy
from moestro.expert_cache.residency import STAGE, Kind, Residency

LAYERS, EXPERTS = 4, 8
names = pytest.mark.parametrize("name", POLICIES)


def make(name: str, slots: int, **options: object) -> Residency:
    return Residency(LAYERS, EXPERTS, slots, 0, make_policy(name, LAYERS, EXPERTS, options))


def serve(residency: Residency, layer: int, experts: Iterable[int]) -> int:
    """One acquire; returns its hits."""
    counts = np.bincount(list(experts), minlength=EXPERTS)
    wanted, slots = residency.want(layer, counts, None)
    hit = slots >= 0
    residency.table.pin(slots[hit])
    for place in residency.place(layer, wanted[~hit], counts):
        if place.slot != STAGE:
            residency.table.bind(place.slot, place.key)
    residency.table.unpin(slots[hit])
    residency.table.check()
    return int(hit.sum())


def run(residency: Residency, experts: Iterable[int], kind: Kind = "decode") -> int:
    experts = list(experts)
    residency.begin_pass(kind)
    return sum(serve(residency, layer, experts) for layer in range(LAYERS))


def resident(residency: Residency, layer: int) -> list[int]:
    return np.flatnonzero(residency.table.rows[layer] >= 0).tolist()


@names
@pytest.mark.parametrize("slots", [1, 8, 20, 31])
@pytest.mark.parametrize("kind", ["decode", "sweep"])
def test_a_cyclic_scan_hits_as_often_as_it_can(name: str, slots: int, kind: Kind) -> None:
    residency = make(name, slots)
    run(residency, range(EXPERTS), kind)
    if kind == "sweep":  # the last layers had fewer free slots than their share
        run(residency, range(EXPERTS), kind)
    hits = [run(residency, range(EXPERTS), kind) for _ in range(5)]
    assert hits == [slots] * 5, "hit rate = slots / working set"


@names
def test_what_fits_is_not_restricted(name: str) -> None:
    residency = make(name, LAYERS * 4)
    for _ in range(3):
        run(residency, range(4))
    assert run(residency, range(4)) == LAYERS * 4
    assert not residency.crowded


@pytest.mark.parametrize("name", ["lru", "lfu", "score"])
def test_a_working_set_that_moves_is_followed(name: str) -> None:
    residency = make(name, LAYERS * 2, **({} if name == "lru" else {"half_life": 2.0}))
    for experts in ((0, 1, 2), (4, 5, 6)):  # three a layer, slots for two
        for _ in range(8):
            hits = run(residency, experts)
        assert residency.crowded
        assert hits == LAYERS * 2


def test_under_crowding_only_the_idle_are_replaced() -> None:
    residency = make("lru", 3)
    residency.begin_pass()
    serve(residency, 0, [0, 1])
    serve(residency, 1, [0])
    residency.begin_pass()
    serve(residency, 0, [0, 2])  # nothing is crowded: 1 is not wanted, and oldest
    assert resident(residency, 0) == [0, 2]
    serve(residency, 1, [0])
    serve(residency, 2, [0])  # the fourth expert of this pass
    assert residency.crowded
    assert resident(residency, 2) == []
    residency.begin_pass()
    serve(residency, 0, [0])
    serve(residency, 2, [0])
    assert resident(residency, 2) == [], "everyone was used in this pass or the last"
    residency.begin_pass()
    serve(residency, 2, [0])
    assert resident(residency, 2) == [0]


def test_two_passes_without_use_make_a_victim() -> None:
    residency = make("lru", 3)
    for number, experts in enumerate(([0, 1, 2], [0, 1, 3], [0, 1, 3])):
        residency.begin_pass()
        serve(residency, 0, experts)
        serve(residency, 3, [7])
        assert residency.crowded
        assert resident(residency, 0) == ([0, 1, 2] if number < 2 else [0, 1, 3])


def test_crowding_counts_each_expert_of_a_pass_once() -> None:
    residency = make("lru", 3)
    residency.begin_pass()
    for _ in range(3):
        serve(residency, 0, [0, 1])
    assert not residency.crowded
    residency.begin_pass("sweep")
    serve(residency, 1, [0])
    residency.begin_pass("decode", resumed=True)
    serve(residency, 1, [0, 1])
    serve(residency, 0, [3])
    assert not residency.crowded
    serve(residency, 0, [4])
    assert residency.crowded
    residency.begin_pass()
    assert residency.crowded, "the last pass still counts"
    residency.begin_pass()
    assert not residency.crowded


def test_a_resumed_pass_does_not_move_the_clock() -> None:
    residency = make("lru", 3)
    residency.begin_pass("sweep")
    residency.begin_pass("decode")
    residency.begin_pass("sweep", resumed=True)
    assert residency.clock == 2


def test_a_sweep_admits_each_layers_share_and_the_busiest_first() -> None:
    residency = make("lru", LAYERS * 2)
    residency.begin_pass("sweep")
    for layer in range(LAYERS):
        serve(residency, layer, [0, 1, 2, 3, 3, 3, 4, 5, 5])
    assert [resident(residency, layer) for layer in range(LAYERS)] == [[3, 5]] * LAYERS


def test_a_sweep_spares_what_decode_uses() -> None:
    residency = make("lru", LAYERS * 3)
    for _ in range(3):
        run(residency, [0, 1])
    run(residency, range(EXPERTS), "sweep")
    assert run(residency, [0, 1]) == LAYERS * 2
    residency.begin_pass("sweep")
    residency.begin_pass("decode")
    assert run(residency, [0, 1]) == LAYERS * 2


def test_decode_misses_are_admitted_busiest_first() -> None:
    residency = make("lru", 2)
    residency.begin_pass()
    serve(residency, 0, [1, 2, 2, 3, 3, 3])
    assert resident(residency, 0) == [2, 3]


def test_what_the_rest_of_the_layer_wants_is_no_victim_either() -> None:
    residency = make("lru", 2)
    residency.begin_pass()
    serve(residency, 0, [0])
    serve(residency, 1, [0])
    for _ in range(3):
        residency.begin_pass()
    part, whole = np.bincount([2, 3], minlength=EXPERTS), np.bincount([0, 2, 3], minlength=EXPERTS)
    wanted, _held = residency.want(0, part, None)
    placed = residency.place(0, wanted, whole)
    assert [place.evicted for place in placed] == [EXPERTS, -1]


def test_what_this_layer_wants_is_never_its_own_victim() -> None:
    residency = make("lru", 2)
    residency.begin_pass()
    serve(residency, 0, [0, 1])
    for _ in range(3):
        residency.begin_pass()
    assert serve(residency, 0, [0, 2]) == 1
    assert resident(residency, 0) == [0, 2]
    assert residency.evictions == 1


def test_without_slots_nothing_is_admitted() -> None:
    residency = make("lru", 0)
    assert run(residency, range(EXPERTS)) == 0
    assert residency.evictions == 0


def test_a_refused_newcomer_leaves_the_victim_to_the_next() -> None:
    class OnlyEven(type(make_policy("lru", 1, 1))):  # type: ignore[misc]
        def admit(self, key: int, victim: int | None, clock: int) -> bool:
            return key % 2 == 0

    residency = Residency(LAYERS, EXPERTS, 1, 0, OnlyEven(LAYERS, EXPERTS))
    run(residency, [7])
    for _ in range(3):
        residency.begin_pass()
    counts = np.bincount([3, 3, 4], minlength=EXPERTS)
    wanted, _held = residency.want(1, counts, None)
    placed = residency.place(1, wanted, counts)
    assert [(place.expert, place.slot) for place in placed] == [(3, STAGE), (4, 0)]


def test_without_a_record_every_layer_gets_its_share_and_they_come_by_layer() -> None:
    residency = make("lru", 4)
    assert LAYERS <= 4
    order = residency.fill_order(host=2 * LAYERS)
    assert sorted(order) == list(range(LAYERS * EXPERTS))
    slots, arena = order[:4], order[4 : 4 + 2 * LAYERS]
    assert slots == sorted(slots)
    assert arena == sorted(arena)
    for part in (slots, arena):
        shares = np.bincount([key // EXPERTS for key in part], minlength=LAYERS)
        assert shares.max() - shares.min() <= 1


def test_what_was_used_comes_before_what_was_not() -> None:
    residency = make("lru", 4)
    residency.begin_pass()
    serve(residency, 2, [5])
    residency.begin_pass()
    serve(residency, 0, [3])
    assert residency.fill_order(host=2)[:2] == [3, 2 * EXPERTS + 5]


def test_nothing_to_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 layers"):
        Residency(0, 4, 2, 0, make_policy("lru", 1, 4))


@pytest.mark.parametrize("kept", [4, 8])
def test_what_is_used_ends_up_in_host_memory(kept: int) -> None:
    """Half of the experts are used; host memory holds as many, but was filled with others too. They
    all come in for good: also copies of what sits in slots, since slots change hands."""
    layers, experts, used = 4, 32, 16
    residency = Residency(layers, experts, kept * layers, 0, make_policy("lru_frequency", 4, 32))
    arena = ArenaTable(used * layers, residency.loss)
    for key in range(0, layers * experts, 2):  # half of these are never used
        arena.lease(key)
        arena.release(key, filled=True)
    draw = np.random.default_rng(1)
    reads: list[int] = []
    for _ in range(400):
        residency.begin_pass()
        reads.append(0)
        for layer in range(layers):
            counts = np.zeros(experts, np.int64)
            counts[draw.choice(used, 10, replace=False)] = 1
            wanted, slots = residency.want(layer, counts, None)
            for place in residency.place(layer, wanted[slots < 0], counts):
                claim = arena.lease(place.key)
                assert claim is not None
                reads[-1] += not claim.filled
                arena.release(place.key, filled=True)
                if place.evicted >= 0:
                    arena.shadow(place.evicted, False)
                if place.slot != STAGE:
                    residency.table.bind(place.slot, place.key)
                    arena.shadow(place.key, True)
    assert sum(reads[:100]) > 0
    assert sum(reads[300:]) <= 2  # 14 to 52 when copies of what is in slots go first


def test_while_slots_are_stable_host_memory_keeps_what_is_in_none() -> None:
    residency = make("lru", 8)
    run(residency, [0, 1])
    assert residency.loss(np.array([0, 1]), 1).tolist() == [0.0, 1.0]
