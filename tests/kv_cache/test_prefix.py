from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.kv_cache.prefix import GONE, Chain, Entry, PrefixIndex, digest256

SIZE = 2


def weak(data: bytes) -> bytes:
    """A hash with two values: nearly everything collides."""
    return bytes([digest256(data)[0] & 1])


def chain(index: PrefixIndex, tokens: tuple[int, ...], salt: str | None = None) -> Chain:
    return Chain(tokens, salt, index.keys(tokens, salt), True, len(tokens) // SIZE)


def publish(index: PrefixIndex, what: Chain, blocks: list[int]) -> list[Entry]:
    entries: list[Entry] = []
    for number, block in enumerate(blocks):
        tokens = what.tokens[number * SIZE : (number + 1) * SIZE]
        parent = entries[-1] if entries else None
        entry = index.publish(Entry(what.keys[number], parent, what.salt, tokens, [block]))
        if entry is None:
            break
        entries.append(entry)
    return entries


def blocks(entries: list[Entry]) -> list[int]:
    return [entry.blocks[0] for entry in entries]


def test_a_key_is_256_bits_and_depends_on_all_before_it() -> None:
    index = PrefixIndex(SIZE)
    keys = index.keys((1, 2, 3, 4, 5), None)
    assert [len(key) for key in keys] == [32, 32]
    assert index.keys((1, 2, 3, 4), None) == keys
    assert index.keys((9, 2, 3, 4), None)[1] != keys[1]
    assert index.keys((), None) == index.keys((1,), None) == ()
    assert index.extend(index.extend(index.root(None), (1, 2)), (3, 4)) == keys[1]


def test_no_salt_and_every_salt_are_apart() -> None:
    index = PrefixIndex(SIZE)
    firsts = {index.keys((1, 2), salt)[0] for salt in (None, "", "a", "b")}
    assert len(firsts) == 4
    publish(index, chain(index, (1, 2), "a"), [0])
    assert len(index.match(chain(index, (1, 2), "a"))) == 1
    assert index.match(chain(index, (1, 2))) == []


def test_a_key_is_published_once_and_the_first_block_stays() -> None:
    index = PrefixIndex(SIZE)
    first = publish(index, chain(index, (1, 2, 3, 4)), [0, 1])
    assert publish(index, chain(index, (1, 2, 3, 4)), [2, 3]) == first
    assert sorted(index.blocks()) == [0, 1]
    index.check()


def test_a_forgotten_block_leaves_a_gap_that_can_be_filled() -> None:
    index = PrefixIndex(SIZE)
    what = chain(index, (1, 2, 3, 4, 5, 6))
    publish(index, what, [0, 1, 2])
    index.forget(1)
    index.forget(7)
    assert blocks(index.match(what)) == [0, GONE, 2]  # block 2 is known by what came before it
    assert not index.has_block(1)
    index.check()
    publish(index, what, [0, 3])
    assert blocks(index.match(what)) == [0, 3, 2]
    index.forget(2)
    index.forget(3)
    assert blocks(index.match(what)) == [0]
    assert not index.has_key(what.keys[1])
    index.check()


def test_a_pinned_entry_stays_without_a_block() -> None:
    index = PrefixIndex(SIZE)
    what = chain(index, (1, 2, 3, 4))
    (first,) = publish(index, what, [0])
    index.pin(first)
    index.forget(0)
    assert len(publish(index, what, [GONE, 1])) == 2
    index.unpin(first)
    assert blocks(index.match(what)) == [GONE, 1]
    index.forget(1)
    assert len(index) == 0


def test_nothing_is_published_behind_a_block_that_left() -> None:
    index = PrefixIndex(SIZE)
    what = chain(index, (1, 2, 3, 4))
    (first,) = publish(index, what, [0])
    index.forget(0)
    assert index.publish(Entry(what.keys[1], first, None, (3, 4), [1])) is None
    assert len(index) == 0


def test_equal_hashes_of_different_tokens_never_match() -> None:
    index = PrefixIndex(SIZE, lambda data: b"same")
    publish(index, chain(index, (1, 2)), [0])
    assert index.match(chain(index, (1, 3))) == []
    assert publish(index, chain(index, (1, 3)), [1]) == []
    assert publish(index, chain(index, (1, 2), "salt"), [1]) == []
    assert blocks(index.match(chain(index, (1, 2)))) == [0]


def test_check_sees_a_wrong_key() -> None:
    index = PrefixIndex(SIZE)
    (entry,) = publish(index, chain(index, (1, 2)), [0])
    entry.tokens = (1, 3)
    with pytest.raises(AssertionError):
        index.check()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_match_is_exact_under_a_hash_that_collides(data: st.DataObject) -> None:
    index = PrefixIndex(SIZE, weak)
    content: dict[int, tuple[str | None, tuple[int, ...]]] = {}  # block -> salt, whole prefix
    prompts = st.lists(st.integers(0, 1), min_size=2, max_size=6).map(tuple)
    salts = st.sampled_from([None, "a"])
    for block in range(0, 60, 3):
        what = chain(index, data.draw(prompts), data.draw(salts))
        for number, held in enumerate(blocks(index.match(what))):
            prefix = (what.salt, what.tokens[: (number + 1) * SIZE])
            assert held == GONE or content[held] == prefix
        fresh = list(range(block, block + len(what.keys)))
        for number, held in enumerate(blocks(publish(index, what, fresh))):
            prefix = (what.salt, what.tokens[: (number + 1) * SIZE])
            assert held == GONE or content.setdefault(held, prefix) == prefix
        if data.draw(st.booleans()) and len(index):
            index.forget(data.draw(st.sampled_from(sorted(index.blocks()))))
        index.check()
