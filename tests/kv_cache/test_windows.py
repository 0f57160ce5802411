"""Layers that see a window: their blocks are given back, and a prefix is reused only where the last
window before its end is there."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moestro.kv_cache.groups import UNLIMITED, group_layers
from moestro.kv_cache.manager import KVManager
from moestro.kv_cache.prefix import GONE, digest256
from moestro.kv_cache.spec import LayerMemory, PagedKV, WindowKV


def full(size: int = 4) -> PagedKV:
    return PagedKV(1, 1, 1, 1, size)


def window(tokens: int, size: int = 4) -> WindowKV:
    return WindowKV(1, 1, 1, 1, size, window=tokens)


def manager(*kinds: LayerMemory, blocks: int, run: int = UNLIMITED) -> KVManager:
    groups = group_layers(kinds)
    size = kinds[0].block_size
    return KVManager(size, blocks, prefix_caching=True, groups=groups, run=run)


def held(kv: KVManager, name: str, group: int) -> int:
    """Blocks that a sequence holds in one group."""
    return sum(block != GONE for block in (kv.table(name), *kv.further_tables(name))[group])


def compute(kv: KVManager, name: str, tokens: tuple[int, ...]) -> int:
    cached = kv.start(name, kv.chain(tokens, None))
    assert cached is not None
    kv.commit(name, tokens, len(tokens))
    return cached


def test_what_a_window_keeps() -> None:
    memory = WindowKV(layers=3, kv_heads=2, head_dim=8, dtype_bytes=2, block_size=16, window=128)
    assert memory.kept() == PagedKV(3, 2, 8, 2, 16)
    assert memory.block_bytes == memory.kept().block_bytes
    assert [memory.seen_from(at) for at in (0, 127, 128, 1000)] == [0, 0, 1, 873]
    assert memory.most_blocks(100, 8192) == 7
    assert memory.most_blocks(1_000_000, 512) == (512 + 128) // 16 + 1


def test_layers_of_two_kinds_share_blocks() -> None:
    groups = group_layers([window(8), full()] * 18)  # as in GPT-OSS-120B
    assert (len(groups.groups), groups.depth, groups.block.layers) == (2, 18, 18)
    assert groups.places[:4] == ((0, 0), (1, 0), (0, 1), (1, 1))
    uneven = group_layers([full()] * 2 + [window(8)])
    assert (len(uneven.groups), uneven.depth) == (3, 1)  # no room of a block is left empty
    many = group_layers([full()] * 24 + [window(8)] * 23)
    assert (len(many.groups), many.depth) == (2, 24)  # but tables are few
    with pytest.raises(ValueError, match="shapes"):
        group_layers([full(), PagedKV(1, 1, 2, 1, 4)])


def test_the_longest_sequence() -> None:
    both = group_layers([full(), window(8)])
    assert both.most_blocks(400, 20) == 100 + (20 + 8) // 4 + 1
    assert both.longest(108, 20) == 400
    assert both.longest(10, 20) == 20
    assert group_layers([window(8)]).longest(8, 20) == UNLIMITED
    assert group_layers([window(8)]).longest(7, 20) == 28


def test_many_windows_hold_one_window_and_a_block() -> None:
    size, seen, run = 4, 12, 20
    kv = manager(full(), window(seen), blocks=60, run=run)
    tokens = tuple(range(100))
    assert kv.start("a", kv.chain(tokens, None)) == 0
    for computed in range(run, len(tokens) + 1, run):
        assert held(kv, "a", 1) * size <= run + seen + 2 * size
        assert len(kv.further_tables("a")[0]) * size >= computed  # room for what is computed now
        kv.commit("a", tokens, computed)
    assert (held(kv, "a", 0), len(kv.table("a"))) == (25, 25)
    for length in range(101, 160):
        assert kv.grow("a", length)
        assert held(kv, "a", 1) * size <= seen + size
        kv.commit("a", (*tokens, *range(100, length)), length)
        kv.check()
    kv.free("a")
    assert kv.free_blocks == 60


def test_a_prefix_is_reused_only_with_its_last_window() -> None:
    kv = manager(full(), window(8), blocks=20)
    tokens = tuple(range(24))
    assert compute(kv, "a", tokens) == 0
    assert kv.lookup(kv.chain((*tokens, 99), None)).tokens == 24
    assert kv.lookup(kv.chain((*tokens[:16], 99), None)).tokens == 16  # given back, not yet taken
    kv.free("a")
    hungry = tuple(range(100, 124))
    assert compute(kv, "b", hungry) == 0  # takes what was given back first: the early windows
    found = [kv.lookup(kv.chain((*tokens[:n], 99), None)).tokens for n in (8, 16, 24)]
    assert found == [0, 0, 24]
    kv.free("b")
    assert compute(kv, "c", (*tokens, 99)) == 24
    assert kv.further_tables("c")[0][:4] == (GONE,) * 4
    kv.check()


def test_half_a_window_is_no_window() -> None:
    kv = manager(window(8), blocks=6)
    tokens = tuple(range(24))
    compute(kv, "a", tokens)
    compute(kv, "b", tuple(range(50, 59)))  # in the first 3 of the 4 blocks that were given back
    found = [kv.lookup(kv.chain((*tokens[:n], 99), None)).tokens for n in (12, 16, 20, 24)]
    assert found == [0, 0, 20, 24]


def test_a_prefix_of_windows_alone_is_known_by_all_that_came_before() -> None:
    kv = manager(window(4), blocks=6)
    tokens = tuple(range(16))
    compute(kv, "a", tokens)
    kv.free("a")
    compute(kv, "b", (50, 51, 52, 53, 54, 55, 56, 57, 58))  # overwrites the first blocks
    assert kv.lookup(kv.chain((*tokens, 99), None)).tokens == 16
    assert kv.lookup(kv.chain((9, 9, 9, 9, *tokens[4:], 99), None)).tokens == 0
    kv.check()


def test_who_shares_a_window_can_still_go_on() -> None:
    """Both hold one window. Giving it back frees nothing, and yet each gets new blocks."""
    kv = manager(window(8), blocks=11, run=8)
    tokens = tuple(range(40))
    assert kv.start("a", kv.chain(tokens[:16], None)) == 0
    kv.commit("a", tokens, 8)
    kv.commit("a", tokens, 16)
    assert kv.start("b", kv.chain(tokens, None)) == 16
    assert kv.free_blocks == 11 - held(kv, "a", 0) - held(kv, "b", 0)  # shared ones count twice
    for computed in (24, 32, 40):
        kv.commit("b", tokens, computed)
        kv.check()
    assert len(kv.table("b")) == 10


SIZE, BLOCKS = 3, 14
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24).map(tuple)
Written = tuple[str | None, tuple[int, ...]]
KINDS = [
    (full(SIZE), window(4, SIZE)),
    (full(SIZE), window(7, SIZE), window(2, SIZE)),
    (window(5, SIZE),),
    (window(1, SIZE),),
]


class WindowMachine(RuleBasedStateMachine):
    """Every computed token is written into a model of the memory, in every group of layers; what a
    group looks at is read back."""

    @initialize(
        kinds=st.sampled_from(KINDS),
        run=st.integers(1, 9),
        weak=st.booleans(),
        caching=st.booleans(),
    )
    def build(self, kinds: tuple[LayerMemory, ...], run: int, weak: bool, caching: bool) -> None:
        def digest(data: bytes) -> bytes:
            return digest256(data)[:1] if weak else digest256(data)

        groups = group_layers(kinds)
        self.kinds, self.run = groups.kinds, run
        self.kv = KVManager(
            SIZE, BLOCKS, prefix_caching=caching, digest=digest, groups=groups, run=run
        )
        self.memory: dict[tuple[int, int], Written] = {}  # place -> salt, prefix up to here
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str | None] = {}
        self.computed: dict[str, int] = {}
        self.count = 0

    def place(self, name: str, group: int, position: int) -> tuple[int, int]:
        table = (self.kv.table(name), *self.kv.further_tables(name))[group]
        assert table[position // SIZE] != GONE
        return table[position // SIZE], position % SIZE

    def written(self, name: str, position: int) -> Written:
        return self.salts[name], tuple(self.tokens[name][: position + 1])

    @rule(tokens=PROMPTS, salt=st.sampled_from([None, None, "s"]), reuse=st.booleans())
    def start(self, tokens: tuple[int, ...], salt: str | None, reuse: bool) -> None:
        self.count += 1
        name = f"s{self.count}"
        chain = self.kv.chain(tokens, salt, reuse=reuse)
        match, free = self.kv.lookup(chain), self.kv.free_blocks
        cached = self.kv.start(name, chain)
        assert (cached is None) == (match.needs > free)
        if not self.tokens and len(tokens) <= self.kv.capacity:
            assert cached is not None, "alone it always fits"
        if cached is None:
            return
        assert cached == match.tokens < len(tokens)
        assert self.kv.free_blocks == free - match.needs
        self.tokens[name], self.salts[name] = list(tokens), salt
        self.computed[name] = cached

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A run of a prompt, or the last token that was appended."""
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        done = self.computed[name]
        upto = data.draw(st.integers(done, min(done + self.run, len(self.tokens[name]))))
        for position in range(done, upto):
            for group in range(len(self.kinds)):
                place = self.place(name, group, position)
                self.memory[place] = self.written(name, position)
        free = self.kv.free_blocks
        self.computed[name] = upto
        self.kv.commit(name, self.tokens[name], upto)
        assert self.kv.free_blocks >= free

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        if self.computed[name] < len(self.tokens[name]):
            return  # as long as its prompt is computed it does not grow
        length, free = len(self.tokens[name]) + 1, self.kv.free_blocks
        needs = len(self.kinds) * (length % SIZE == 1 or SIZE == 1)
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
    def what_is_seen_can_be_read(self) -> None:
        for name, computed in getattr(self, "computed", {}).items():
            for group, kind in enumerate(self.kinds):
                for position in range(kind.seen_from(computed), computed):
                    place = self.place(name, group, position)
                    assert self.memory[place] == self.written(name, position)

    @invariant()
    def no_more_is_held_than_needed(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        owned: Counter[int] = Counter()
        for name, tokens in self.tokens.items():
            done = self.computed[name] == len(tokens)
            for group, kind in enumerate(self.kinds):
                table = (self.kv.table(name), *self.kv.further_tables(name))[group]
                mine = [block for block in table if block != GONE]
                owned.update(mine)
                assert len(mine) <= kind.most_blocks(len(tokens), self.run)
                if done and not kind.keeps_all:  # the window of the next token, and no more
                    first = kind.seen_from(len(tokens)) // SIZE
                    assert len(mine) == -(-len(tokens) // SIZE) - first
        assert self.kv.stats().blocks_used == len(owned)


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
