"""What a benchmark makes up: its laws hold, and an engine obeys it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moestro.config import Config
from moestro.engine import synthetic
from moestro.engine.build import build_engine
from moestro.engine.layers.moe import route, route_to
from moestro.engine.models.router import BiasedTopK, Router, Scores, TopKSoftmax
from moestro.engine.models.spec import MoESpec, RouterDtype
from moestro.engine.sampler import Sampler
from moestro.engine.scramble import ScramblingSampler
from moestro.engine.synthetic import (
    FROZEN,
    RoutingSource,
    Synthetic,
    parse_routing,
    row_number,
    scrambled,
)
from moestro.errors import ConfigError
from moestro.expert_cache.trace import TraceWriter, read_trace
from tests.oracle.drive import generate, greedy, settle


def names(count: int, start: int = 0) -> list[str]:
    return [f"s{number}" for number in range(start, start + count)]


# --- laws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 1, synthetic.ROUNDS])
@pytest.mark.parametrize("law", ["uniform", "zipf:1.2", "zipf:6"])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (8, 2), (4, 4), (1, 1)])
def test_experts_are_distinct(
    monkeypatch: pytest.MonkeyPatch, rounds: int, law: str, experts: int, top_k: int
) -> None:
    monkeypatch.setattr(synthetic, "ROUNDS", rounds)
    source = RoutingSource(law, 3, experts, top_k, 0.5, 1)
    for step in range(4):
        ids = source.step(names(5, start=step))
        assert (ids.shape, ids.dtype) == ((3, 5, top_k), np.int32)
        assert ids.min() >= 0
        assert ids.max() < experts
        ranked = np.sort(ids, -1)
        assert (ranked[..., 1:] > ranked[..., :-1]).all()


def test_uniform_uses_all_experts_alike() -> None:
    source = RoutingSource("uniform", 2, 16, 4, 0.0, 3)
    drawn = np.concatenate([source.step(names(50)) for _ in range(100)], 1)
    for layer in drawn:
        share = np.bincount(layer.ravel(), minlength=16) / len(layer)
        assert np.abs(share - 4 / 16).max() < 5 * (0.25 * 0.75 / len(layer)) ** 0.5


@pytest.mark.parametrize("rounds", [0, synthetic.ROUNDS])
def test_zipf_without_replacement(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    monkeypatch.setattr(synthetic, "ROUNDS", rounds)
    source = RoutingSource("zipf:1.5", 2, 6, 2, 0.0, 4)
    law = np.arange(1, 7) ** -1.5
    law /= law.sum()
    # Of two draws without replacement: first it, or another first and then it.
    wanted = law + np.array(
        [sum(law[j] * p / (1 - law[j]) for j in range(6) if law[j] != p) for p in law]
    )
    drawn = np.concatenate([source.step(names(60)) for _ in range(200)], 1)
    for layer in drawn:
        share = np.sort(np.bincount(layer.ravel(), minlength=6) / len(layer))[::-1]
        assert share == pytest.approx(wanted, abs=0.02)


def test_layers_have_their_own_favourites() -> None:
    drawn = RoutingSource("zipf:4", 8, 64, 1, 0.0, 5).step(names(40))
    favourites = {int(np.bincount(layer.ravel()).argmax()) for layer in drawn}
    assert len(favourites) > 4


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 1.0])
def test_the_keep_rate(keep: float) -> None:
    experts, top_k = 512, 4
    source = RoutingSource("uniform", 8, experts, top_k, keep, 6)
    last, kept, rows = source.step(names(32)), 0, 0
    for _ in range(20):
        now = source.step(names(32))
        kept += int((last[..., :, None] == now[..., None, :]).sum())
        rows += last.size
        last = now
    again = (1 - keep) * top_k * (1 - keep) / experts  # what was let go may be drawn anew
    assert kept / rows == pytest.approx(keep + again, abs=0.01)


def test_a_row_keeps_its_own_experts_wherever_it_stands() -> None:
    source = RoutingSource("uniform", 3, 256, 4, 1.0, 7)
    first = source.step(["a", "b", "c"])
    second = source.step(["c", "new", "a"])
    assert (second[:, 0] == first[:, 2]).all()
    assert (second[:, 2] == first[:, 0]).all()
    third = source.step(["b", "new"])  # b was away for a step: it starts anew
    assert (third[:, 1] == second[:, 1]).all()
    assert not (third[:, 0] == first[:, 1]).all()


def test_frozen_rows_repeat_and_others_go_on() -> None:
    source = RoutingSource("uniform", 3, 256, 4, 0.0, 8)
    first = source.step([FROZEN + "a", "b"])
    second = source.step([FROZEN + "a", "b"])
    assert (second[:, 0] == first[:, 0]).all()
    assert not (second[:, 1] == first[:, 1]).all()


def test_the_seed_decides() -> None:
    drawn = [RoutingSource("zipf:1", 2, 32, 4, 0.0, seed).step(names(3)) for seed in (1, 1, 2)]
    assert (drawn[0] == drawn[1]).all()
    assert not (drawn[0] == drawn[2]).all()


def test_a_step_of_many_rows_is_quick() -> None:
    source, took = RoutingSource("zipf:1", 48, 128, 8, 0.5, 0), []
    for _ in range(10):
        began = time.perf_counter()
        source.step(names(64))
        took.append(time.perf_counter() - began)
    assert min(took) < 0.02  # seconds; about 2 ms, and hundreds if rows were drawn one by one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "none of uniform"),
        ("zipf", "none of uniform"),
        ("zipf:", "exponent of zipf"),
        ("zipf:-1", "exponent of zipf"),
        ("zipf:nan", "exponent of zipf"),
        ("replay:", "none of uniform"),
        ("random", "'random' is none of uniform, zipf:A and replay:TRACE"),
    ],
)
def test_unknown_laws(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_routing(text)


def test_a_keep_rate_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"1\.5.*from 0 to 1"):
        RoutingSource("uniform", 1, 4, 2, 1.5, 0)


# --- replay ---------------------------------------------------------------------------------


def recorded(path: Path, steps: list[tuple[list[str], int]], kind: str = "decode") -> Path:
    """A trace of 2 layers of 8 experts, top 2: in step n all rows of layer l have (n + l) % 8."""
    writer = TraceWriter(path, 2, 8, 2, "m")
    for rows, number in steps:
        writer.begin(kind, len(rows))  # type: ignore[arg-type]
        for layer in range(2):
            first = (np.arange(len(rows)) + number + layer) % 8
            ids = np.stack([first, (first + 1) % 8], 1)
            writer.record(layer, ids, rows)
    writer.close()
    return path


def test_replay_follows_recorded_sequences_and_wraps_around(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", [(["a", "b"], 0), (["a", "b"], 3), (["b"], 5)])
    source = RoutingSource(f"replay:{path}", 2, 8, 2, 0.0, 0)
    seen = [source.step(["x", "y"])[0, :, 0].tolist() for _ in range(6)]
    # x starts where a did (0, 3), then goes on along the tape with b's steps (1, 4, 5); y at b.
    assert seen == [[0, 1], [3, 4], [1, 5], [4, 0], [5, 3], [0, 1]]
    assert source.step(["y"]).tolist() == [[[4, 5]], [[5, 6]]]


def test_replay_of_rows_whose_sequence_is_unknown(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", [([], 0)])
    writer = TraceWriter(path, 2, 8, 2, "m")
    writer.begin("decode", 2)
    for layer in range(2):
        writer.record(layer, np.array([[0, 1], [2, 3]]))
    writer.close()
    source = RoutingSource(f"replay:{path}", 2, 8, 2, 0.0, 0)
    assert source.step(["x", "y"]).tolist() == [[[0, 1], [2, 3]]] * 2


def test_replay_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", [(["a"], 0)])
    with pytest.raises(ConfigError, match="2 layers of 8 experts, top 2; the model has 3 of 8"):
        RoutingSource(f"replay:{path}", 3, 8, 2, 0.0, 0)
    with pytest.raises(ConfigError, match="--keep"):
        RoutingSource(f"replay:{path}", 2, 8, 2, 0.5, 0)
    swept = recorded(tmp_path / "s", [(["a"], 0)], kind="sweep")
    with pytest.raises(ConfigError, match="no decode steps"):
        RoutingSource(f"replay:{swept}", 2, 8, 2, 0.0, 0)


# --- tokens ---------------------------------------------------------------------------------


def test_the_formula() -> None:
    assert scrambled(5, 2, 7, 32000) == (5 * 7919 + 2 * 104729 + 7 * 15485863) % 31997 + 3
    found = {scrambled(11, step, 1, 32000) for step in range(1000)}
    assert (min(found) >= 3, max(found) < 32000, len(found)) == (True, True, 1000)
    biggest = scrambled(2**18, 2**20, 0xFFFF, 2**18)
    assert 3 <= biggest < 2**18
    assert 2**18 * 7919 + 2**20 * 104729 + 0xFFFF * 15485863 < 2**63


def test_row_numbers() -> None:
    assert row_number("run-0") == row_number("run-0") != row_number("run-1")
    assert 0 <= row_number("x") < 2**16


def test_the_sampler_scrambles_what_was_chosen() -> None:
    logits = torch.randn(2, 50)
    plain, other = Sampler(50), ScramblingSampler(50)
    for sampler in (plain, other):
        sampler.add(greedy("a", (1,), 9))
        sampler.add(greedy("b", (1,), 9))
    chosen = plain.sample(["a", "b"], [4, 5], logits.clone())
    found = other.sample(["a", "b"], [4, 5], logits.clone())
    assert [one.token for one in found] == [
        scrambled(one.token, index, row_number(one.id), 50)
        for one, index in zip(chosen, [4, 5], strict=True)
    ]


# --- in an engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", list(RouterDtype))
def test_given_experts_get_the_routers_own_weights(renormalize: bool, dtype: RouterDtype) -> None:
    spec = MoESpec(8, 3, 16, renormalize, dtype)
    weight, x = torch.randn(8, 12), torch.randn(5, 12)
    weights, ids = route(spec, weight, x)
    assert torch.equal(route_to(spec, weight, x, ids)[0], weights)
    other, _ = route_to(spec, weight, x, torch.tensor([[0, 1, 2]]).expand(5, 3))
    wanted = torch.softmax(x @ weight.T, -1)[:, :3]
    if renormalize:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(other, wanted)


@pytest.mark.parametrize(
    "router",
    [
        TopKSoftmax(),
        TopKSoftmax(bias=True),
        BiasedTopK(Scores.SIGMOID, groups=4, kept=2, scale=2.5, sum_add=1e-20),
        BiasedTopK(Scores.SOFTMAX, sum_min=1e-12, wide=False),
    ],
    ids=str,
)
def test_given_experts_get_the_weights_of_other_routers_too(router: Router) -> None:
    spec = MoESpec(8, 3, 16, True, RouterDtype.MODEL, router)
    weight, x = torch.randn(8, 12), torch.randn(5, 12)
    bias = torch.randn(8) if spec.biased else None
    weights, ids = route(spec, weight, x, bias)
    torch.testing.assert_close(route_to(spec, weight, x, ids, bias)[0], weights)


def test_an_engine_obeys(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder, trace = checkpoint("qwen3-dense-layer"), tmp_path / "trace"
    made_up = Synthetic(scramble=True, routing="zipf:1", keep=0.5, seed=9)
    config = Config(load_format="dummy", threads=1, kv_cache_tokens=512, trace=trace)
    engine = build_engine(config, folder, synthetic=made_up)
    try:
        outputs = generate(engine, [greedy("a", range(5), 6), greedy("b", range(9), 6)])
        settle(engine)
    finally:
        engine.close()
    tokens = outputs["a"].tokens + outputs["b"].tokens
    assert min(tokens) >= 3
    steps = [step for step in read_trace(trace) if step.kind == "decode"]
    assert len(steps) == 5
    source = RoutingSource("zipf:1", 3, 8, 3, 0.5, 9)
    for step in steps:
        found = np.stack([route.ids for route in step.routes])
        assert (found == source.step(["a", "b"])).all()


def test_an_engine_scrambles_each_output(checkpoint: Callable[[str], Path]) -> None:
    config = Config(load_format="dummy", threads=1, kv_cache_tokens=512)
    firsts = []
    for made_up in (None, Synthetic(scramble=True)):
        engine = build_engine(config, checkpoint("mixtral"), synthetic=made_up)
        try:
            vocab = engine.info.vocab_size
            firsts.append(generate(engine, [greedy("a", range(5), 3)])["a"].tokens[0])
        finally:
            engine.close()
    assert firsts[1] == scrambled(firsts[0], 0, row_number("a"), vocab)


def test_a_wrong_trace_is_found_before_anything_is_loaded(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = recorded(tmp_path / "t", [(["a"], 0)])
    progress: list[str] = []
    with pytest.raises(ConfigError, match="the model has"):
        build_engine(
            Config(threads=1),
            checkpoint("mixtral"),
            lambda stage, done, total: progress.append(stage),
            Synthetic(routing=f"replay:{path}"),
        )
    assert progress == []
