from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.kv_cache.blocks import BlockPool
from moestro.kv_cache.spec import PagedKV


def test_spec_sizes() -> None:
    spec = PagedKV(layers=3, kv_heads=2, head_dim=8, dtype_bytes=2, block_size=16)
    assert spec.token_bytes == 2 * 3 * 2 * 8 * 2
    assert spec.block_bytes == 16 * spec.token_bytes
    assert spec.blocks_in(spec.block_bytes * 4 - 1) == 3
    with pytest.raises(AssertionError):
        PagedKV(layers=0, kv_heads=2, head_dim=8, dtype_bytes=2, block_size=16)


def test_empty_blocks_are_taken_before_cached_ones_and_those_oldest_first() -> None:
    pool = BlockPool(5)
    a, b, c, d = pool.take(4)
    for block, keep in ((c, True), (a, True), (b, False), (d, True)):
        pool.release(block, keep=keep)
    assert (pool.free, pool.cached) == (5, 3)
    assert set(pool.take(2)) == {b, 4}
    assert pool.take(3) == [c, a, d]
    assert (pool.free, pool.cached) == (0, 0)


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share(block)
    pool.release(block, keep=True)
    assert not pool.is_free(block)
    assert pool.free == 1
    pool.release(block, keep=True)
    assert pool.is_free(block)
    pool.share(block)  # a cached block is revived
    assert (pool.free, pool.cached) == (1, 0)
    pool.check({block: 1})


def test_check_sees_a_wrong_count() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError):
        pool.check({})
    with pytest.raises(AssertionError):
        pool.check({block: 2})


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_pool_follows_a_simple_model(data: st.DataObject) -> None:
    pool = BlockPool(6)
    owners: dict[int, int] = {}
    cached: list[int] = []  # oldest first
    for _ in range(data.draw(st.integers(1, 40))):
        free = 6 - len(owners)
        action = data.draw(st.sampled_from(["take", "share", "release"]))
        if action == "take" and free:
            count = data.draw(st.integers(1, free))
            taken = pool.take(count)
            assert not set(taken) & set(owners)
            old = cached[: max(0, count - (free - len(cached)))]
            assert set(cached) & set(taken) == set(old)
            cached = cached[len(old) :]
            owners |= dict.fromkeys(taken, 1)
        elif action == "share" and (owners or cached):
            block = data.draw(st.sampled_from(sorted(owners) + cached))
            pool.share(block)
            owners[block] = owners.get(block, 0) + 1
            cached = [other for other in cached if other != block]
        elif action == "release" and owners:
            block, keep = data.draw(st.sampled_from(sorted(owners))), data.draw(st.booleans())
            pool.release(block, keep=keep)
            owners[block] -= 1
            if not owners[block]:
                del owners[block]
                cached += [block] * keep
        pool.check(owners)
        assert list(pool.cached_blocks()) == cached
        assert (pool.free, pool.cached) == (6 - len(owners), len(cached))
