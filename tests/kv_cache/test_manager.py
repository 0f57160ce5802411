from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moestro.kv_cache.manager import KVManager
from moestro.kv_cache.prefix import digest256


def started(kv: KVManager, name: str, tokens: tuple[int, ...], salt: str | None = None) -> int:
    cached = kv.start(name, kv.chain(tokens, salt))
    assert cached is not None
    return cached


def run(kv: KVManager, name: str, tokens: tuple[int, ...]) -> int:
    """Start, compute and free."""
    cached = started(kv, name, tokens)
    kv.commit(name, tokens, len(tokens))
    kv.free(name)
    return cached


def test_at_least_one_token_is_computed() -> None:
    kv = KVManager(4, 8, prefix_caching=True)
    assert run(kv, "a", tuple(range(8))) == 0
    assert run(kv, "b", tuple(range(8))) == 4
    assert run(kv, "c", tuple(range(9))) == 8
    assert run(kv, "d", tuple(range(4))) == 0
    assert kv.stats().prefix_queries == 8 + 8 + 9 + 4
    assert kv.stats().prefix_hits == 12
    kv.check()


def test_only_computed_blocks_are_published() -> None:
    kv = KVManager(4, 12, prefix_caching=True)
    tokens = tuple(range(12))
    started(kv, "a", tokens)
    assert kv.lookup(kv.chain(tokens, None)).tokens == 0
    kv.commit("a", tokens, 7)
    assert kv.lookup(kv.chain(tokens, None)).tokens == 4
    kv.commit("a", tokens, 8)
    assert kv.lookup(kv.chain(tokens, None)).tokens == 8
    kv.free("a")
    assert kv.stats().blocks_cached == 2
    kv.check()


def test_generated_tokens_are_reused_too() -> None:
    kv = KVManager(4, 12, prefix_caching=True)
    tokens = list(range(6))
    started(kv, "a", tuple(tokens))
    kv.commit("a", tokens, 6)
    for token in range(6, 14):
        tokens.append(token)
        assert kv.grow("a", len(tokens))
        kv.commit("a", tokens, len(tokens))
    assert len(kv.table("a")) == 4
    assert kv.lookup(kv.chain((*range(14), 99), None)).tokens == 12
    kv.check()


def test_salts_and_reuse_off_keep_apart() -> None:
    kv = KVManager(4, 40, prefix_caching=True)
    tokens = tuple(range(9))
    for salt in (None, "", "x"):
        assert started(kv, f"a{salt}", tokens, salt) == 0
        kv.commit(f"a{salt}", tokens, 9)
    assert started(kv, "x", tokens, "x") == 8
    queries = kv.stats().prefix_queries
    assert kv.start("bypass", kv.chain(tokens, "x", reuse=False)) == 0
    assert kv.stats().prefix_queries == queries
    assert not set(kv.table("bypass")) & set(kv.table("x"))
    kv.check()


def test_caching_off() -> None:
    kv = KVManager(4, 8, prefix_caching=False)
    tokens = tuple(range(9))
    assert run(kv, "a", tokens) == run(kv, "b", tokens) == 0
    stats = kv.stats()
    assert (stats.blocks_cached, stats.prefix_queries, stats.prefix_hits) == (0, 0, 0)
    kv.check()


def test_what_does_not_fit_changes_nothing() -> None:
    kv = KVManager(4, 4, prefix_caching=True)
    started(kv, "a", tuple(range(9)))
    before = kv.table("a"), kv.stats()
    assert kv.start("b", kv.chain(tuple(range(5)), None)) is None
    assert not kv.grow("a", 17)
    assert (kv.table("a"), kv.stats()) == before
    assert kv.grow("a", 16)
    assert kv.free_blocks == 0
    kv.check()


def test_reused_free_blocks_count_as_needed() -> None:
    kv = KVManager(4, 4, prefix_caching=True)
    run(kv, "a", tuple(range(8)))
    started(kv, "other", (50, 51, 52, 53, 54))
    tokens = (*range(8), 9, 10, 11, 12, 13)
    assert kv.lookup(kv.chain(tokens, None)).needs == 4
    assert kv.start("b", kv.chain(tokens, None)) is None
    assert kv.start("c", kv.chain(tokens[:7], None)) == 4
    kv.check()


def test_shared_blocks_cost_nothing() -> None:
    kv = KVManager(4, 4, prefix_caching=True)
    tokens = tuple(range(9))
    started(kv, "a", tokens)
    kv.commit("a", tokens, 9)
    assert kv.lookup(kv.chain(tokens, None)).needs == 1
    assert started(kv, "b", tokens) == 8
    assert kv.table("a")[:2] == kv.table("b")[:2]
    kv.free("a")
    kv.check()
    kv.free("b")
    kv.check()
    assert kv.free_blocks == 4


def test_the_prefix_outlives_the_tail() -> None:
    kv = KVManager(4, 4, prefix_caching=True)
    tokens = tuple(range(16))
    run(kv, "a", tokens)
    for extra in range(3):
        started(kv, f"x{extra}", (100 + extra,))
        assert kv.lookup(kv.chain((*tokens, 0), None)).blocks == 3 - extra


def test_the_table_is_one_object_until_it_changes() -> None:
    kv = KVManager(4, 4, prefix_caching=True)
    started(kv, "a", (1, 2, 3))
    table = kv.table("a")
    assert kv.grow("a", 4)
    assert kv.table("a") is table
    assert kv.grow("a", 5)
    assert len(kv.table("a")) == 2


def test_may_reuse_is_a_necessary_condition() -> None:
    kv = KVManager(4, 8, prefix_caching=True)
    tokens = tuple(range(13))
    run(kv, "a", tokens[:9])
    chain = kv.chain(tokens, None)
    assert [kv.may_reuse(chain, count) for count in range(5)] == [True, True, True, False, False]
    assert not kv.may_reuse(kv.chain(tokens, None, reuse=False), 1)


def test_unknown_and_double_ids_are_our_bugs() -> None:
    kv = KVManager(4, 4, prefix_caching=True)
    started(kv, "a", (1,))
    with pytest.raises(AssertionError):
        started(kv, "a", (1,))
    kv.free("a")
    with pytest.raises(KeyError):
        kv.free("a")


SIZE, BLOCKS = 3, 9
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
Written = tuple[str | None, tuple[int, ...]]


class ManagerMachine(RuleBasedStateMachine):
    """Every computed token is written into a model of the memory; every reuse is read back."""

    @initialize(weak=st.booleans(), caching=st.booleans())
    def build(self, weak: bool, caching: bool) -> None:
        def digest(data: bytes) -> bytes:
            return digest256(data)[:1] if weak else digest256(data)

        self.caching = caching
        self.kv = KVManager(SIZE, BLOCKS, prefix_caching=caching, digest=digest)
        self.memory: dict[tuple[int, int], Written] = {}  # place -> salt, prefix up to here
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str | None] = {}
        self.computed: dict[str, int] = {}
        self.count = 0

    def place(self, name: str, position: int) -> tuple[int, int]:
        return self.kv.table(name)[position // SIZE], position % SIZE

    def written(self, name: str, position: int) -> Written:
        return self.salts[name], tuple(self.tokens[name][: position + 1])

    @rule(tokens=PROMPTS, salt=st.sampled_from([None, "s"]), reuse=st.booleans())
    def start(self, tokens: tuple[int, ...], salt: str | None, reuse: bool) -> None:
        self.count += 1
        name = f"s{self.count}"
        chain = self.kv.chain(tokens, salt, reuse=reuse)
        match, free = self.kv.lookup(chain), self.kv.free_blocks
        cached = self.kv.start(name, chain)
        assert (cached is None) == (match.needs > free)
        if cached is None:
            return
        assert cached == match.tokens < len(tokens)
        assert self.kv.free_blocks == free - match.needs
        assert cached == 0 or (reuse and self.caching)
        self.tokens[name], self.salts[name] = list(tokens), salt
        self.computed[name] = cached

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        upto = data.draw(st.integers(self.computed[name], len(self.tokens[name])))
        for position in range(self.computed[name], upto):
            self.memory[self.place(name, position)] = self.written(name, position)
        self.computed[name] = upto
        self.kv.commit(name, self.tokens[name], upto)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), token=st.integers(0, 2))
    def append(self, data: st.DataObject, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        length, free = len(self.tokens[name]) + 1, self.kv.free_blocks
        needs = -(-length // SIZE) - len(self.kv.table(name))
        assert self.kv.grow(name, length) == (needs <= free)
        if needs <= free:
            self.tokens[name].append(token)
            assert self.kv.free_blocks == free - needs

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.kv.free(name)
        del self.tokens[name], self.salts[name], self.computed[name]

    @invariant()
    def what_is_computed_can_be_read(self) -> None:
        if not hasattr(self, "kv"):
            return
        for name, computed in self.computed.items():
            for position in range(computed):
                place = self.place(name, position)
                assert self.memory[place] == self.written(name, position)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        held = Counter(block for name in self.tokens for block in self.kv.table(name))
        stats = self.kv.stats()
        assert stats.blocks_used == len(held) == BLOCKS - self.kv.free_blocks
        assert self.kv.holders() == set(self.tokens)
        assert self.caching or max(held.values(), default=1) == 1


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
