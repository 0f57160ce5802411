"""What changes while the engine runs: at the handle, in the scheduler, in the expert cache."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moestro.config import Config
from moestro.engine.expert_policy import PolicyKeeper
from moestro.engine.messages import Tuning
from moestro.errors import ConfigError, InvalidRequest, QueueFull, Unavailable
from moestro.expert_cache.policies import POLICIES, make_policy
from tests.engine.fake_engine import DEADLY
from tests.engine.test_handle import Reader, counted, fake, handle, lives, request, until
from tests.expert_cache.test_residency import EXPERTS, LAYERS, make, run


def seats(number: int) -> Tuning:
    return Tuning(number, "lru_frequency", "info")


async def test_a_change_holds_here_and_there(tmp_path: Path) -> None:
    async with handle(tmp_path, max_num_seqs=8, max_num_queued=4) as engine:
        await engine.tune(seats(2), 1)
        readers = [Reader(engine, request(f"r{i}")) for i in range(3)]
        with pytest.raises(QueueFull, match="1 requests wait behind 2"):
            engine.open([request("late")])
        for reader in readers:
            await reader.done()
            assert reader.tokens == counted(60)
        assert lives(tmp_path)[0].startswith("seats=2 ")


async def test_the_next_engine_gets_the_change_first(tmp_path: Path) -> None:
    async with handle(tmp_path, max_num_seqs=8) as engine:
        readers = [Reader(engine, request(f"r{i}", tokens=300)) for i in range(6)]
        await engine.tune(seats(2), 1)  # fewer than live: they go on
        await until(lambda: all(reader.tokens for reader in readers))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        for reader in readers:
            await reader.done()
            assert reader.tokens == counted(300)
        assert lives(tmp_path)[1].startswith("seats=2 r0:")
        with pytest.raises(InvalidRequest, match="holds 3 at most"):
            engine.open([request(f"n{i}") for i in range(4)])


async def test_what_the_engine_refuses_is_told(tmp_path: Path) -> None:
    async with handle(tmp_path, max_num_seqs=8, max_num_queued=4) as engine:
        with pytest.raises(InvalidRequest, match="odd seats"):
            await engine.tune(seats(3), 1)
        Reader(engine, request("a"))
        engine.open([request(f"r{i}") for i in range(11)])


async def test_an_engine_that_dies_of_it_comes_back_as_it_was(tmp_path: Path) -> None:
    async with handle(tmp_path, max_num_seqs=8) as engine:
        await engine.tune(seats(4), 9)
        reader = Reader(engine, request("a", tokens=200))
        await until(lambda: bool(reader.tokens))
        with pytest.raises(Unavailable, match="nothing was changed"):
            await engine.tune(seats(DEADLY), 9)
        await reader.done()
        assert reader.tokens == counted(200)
        assert lives(tmp_path)[1].startswith("seats=4 a:")


async def test_while_it_is_not_ready_nothing_changes(tmp_path: Path) -> None:
    engine = fake(tmp_path)
    try:
        with pytest.raises(Unavailable, match="nothing was changed"):
            await engine.tune(seats(2), 1)
    finally:
        await engine.aclose()


async def test_background_takes_no_place_in_the_queue(tmp_path: Path) -> None:
    async with handle(tmp_path, max_num_seqs=2, max_num_queued=1) as engine:
        rest = [Reader(engine, replace(request(f"b{i}"), background=True)) for i in range(3)]
        assert engine.foreground == 0
        readers = [Reader(engine, request(f"r{i}")) for i in range(3)]
        assert engine.foreground == 3
        with pytest.raises(QueueFull):
            engine.open([request("late")])
        rest.append(Reader(engine, replace(request("b4"), background=True)))
        await asyncio.gather(*(reader.done() for reader in (*readers, *rest)))
        assert engine.foreground == 0


# --- the expert cache -----------------------------------------------------------------------


@pytest.mark.parametrize("old", POLICIES)
@pytest.mark.parametrize("new", POLICIES)
def test_a_new_policy_keeps_what_is_in_slots(old: str, new: str) -> None:
    residency = make(old, 12)
    for experts in ((0, 1, 2), (0, 1, 2), (2, 3)):
        run(residency, experts)
    before = residency.table.slot_of.copy()
    residency.change_policy(make_policy(new, LAYERS, EXPERTS))
    assert (residency.table.slot_of == before).all()
    assert residency.policy.name == new
    held = np.flatnonzero(before >= 0)
    experts = np.bincount(held % EXPERTS, minlength=EXPERTS)
    most = int(experts.argmax())
    assert run(residency, [most]) == int(experts[most])  # hits, from what the old one kept
    for _ in range(5):
        run(residency, (4, 5, 6))
    residency.table.check()


@pytest.mark.parametrize("new", ["lru", "lfu", "lru_frequency", "score"])
def test_a_new_policy_begins_with_the_old_ones_order(new: str) -> None:
    residency = make("lru", 12)
    for expert in (0, 1, 2):
        run(residency, [expert])
    keys = residency.table.owner[residency.table.owner >= 0]
    old = keys[residency.policy.rank(keys, residency.clock)]
    residency.change_policy(make_policy(new, LAYERS, EXPERTS))
    ranked = keys[residency.policy.rank(keys, residency.clock)]
    assert set(ranked[:4].tolist()) <= set(old[:6].tolist())
    assert set(ranked[-4:].tolist()) <= set(old[-6:].tolist())


def test_what_a_policy_learned_is_kept_when_another_takes_over(tmp_path: Path) -> None:
    file = tmp_path / "state" / "learned.npz"
    config = Config(expert_policy="activation_aware", expert_policy_state=file)
    keeper = PolicyKeeper(config, LAYERS, EXPERTS, tmp_path)
    ids = np.array([[1, 3]])
    keeper.policy.observe(["a"], 0, ids, np.array([0]))
    keeper.policy.finish("a")
    keeper.save()
    keeper.use(keeper.make("lru"))
    assert keeper.policy.name == "lru"
    assert file.exists()
    again = keeper.make("activation_aware")
    keys = np.arange(EXPERTS)
    assert set(keys[again.rank(keys, 0)][-2:].tolist()) == {1, 3}
    file.write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="cannot read"):
        keeper.make("activation_aware")
    assert keeper.policy.name == "lru"
    keeper.save()  # lru keeps nothing
    assert file.read_bytes() == b"damaged"


def test_a_file_for_a_policy_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    config = Config(expert_policy="lru", expert_policy_state=tmp_path / "x")
    with pytest.raises(ConfigError, match="the lru policy keeps nothing"):
        PolicyKeeper(config, LAYERS, EXPERTS, tmp_path)
