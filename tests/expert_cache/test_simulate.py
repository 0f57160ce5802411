from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import ConfigError
from moestro.expert_cache.policies import POLICIES
from moestro.expert_cache.policies.belady import optimal_hits
from moestro.expert_cache.rebatch import rebatch
from moestro.expert_cache.replay import NAMES, Steps
from moestro.expert_cache.simulate import main, replay, table
from moestro.expert_cache.trace import Header, Route, Step, TraceWriter
from tests.expert_cache.fakes import small_cache

LAYERS, EXPERTS, TOP = 2, 6, 2
HEADER = Header(1, LAYERS, EXPERTS, TOP, "m", 1000)
LINK = {"link_bytes_per_second": 1e6, "expert_bytes": 1000}

row = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP, max_size=TOP, unique=True)
steps = st.lists(
    st.tuples(
        st.sampled_from(["decode", "decode", "sweep"]),
        st.lists(st.lists(row, min_size=LAYERS, max_size=LAYERS), min_size=1, max_size=3),
    ),
    max_size=14,
)


def make_trace(content: list[Any]) -> Steps:
    """`content`: (kind, [for each sequence the ids of each layer])."""
    out = []
    for kind, sequences in content:
        owners = np.arange(len(sequences))
        routes = [
            Route(layer, np.array([ids[layer] for ids in sequences]), owners)
            for layer in range(LAYERS)
        ]
        out.append(Step(kind, len(sequences), False, routes))
    return Steps(HEADER, out)


def scan(passes: int) -> Steps:
    ids = np.arange(EXPERTS).reshape(-1, TOP)
    route = [Route(layer, ids, np.arange(3)) for layer in range(LAYERS)]
    return Steps(HEADER, [Step("decode", 3, False, route) for _ in range(passes)])


@given(content=steps, slots=st.integers(0, LAYERS * EXPERTS))
@settings(max_examples=60, deadline=None)
def test_no_policy_beats_the_optimum(content: list[Any], slots: int) -> None:
    trace = make_trace(content)
    wanted = sum(len(set(np.unique(route.ids).tolist())) for step in trace for route in step.routes)
    best = replay(trace, "belady", slots, **LINK)
    for name in NAMES:
        report = replay(trace, name, slots, **LINK)
        assert report.hits + report.misses == wanted
        assert report.hits <= best.hits
        assert sum(report.hits_per_layer) == report.hits
        assert sum(report.misses_per_layer) == report.misses
        assert report.bytes == report.misses * 1000
        assert report.exposed_seconds == pytest.approx(report.bytes / 1e6)
        assert report.decode_hits <= report.hits
        if name != "belady":
            assert report.staged + report.evictions <= report.misses


@given(
    wanted=st.lists(st.sets(st.integers(0, 4), max_size=3).map(sorted), max_size=7),
    slots=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_belady_is_the_optimum(wanted: list[list[int]], slots: int) -> None:
    """Compared with trying everything."""
    states = {frozenset[int](): 0}
    for keys in wanted:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            now = hits + len(held.intersection(keys))
            pool = sorted(held.union(keys))
            for size in range(min(slots, len(pool)) + 1):
                for kept in combinations(pool, size):
                    state = frozenset(kept)
                    after[state] = max(after.get(state, 0), now)
        states = after
    assert sum(optimal_hits(wanted, slots)) == max(states.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slots", [0, 1, 5, 11, 12])
def test_a_cyclic_scan(name: str, slots: int) -> None:
    report = replay(scan(20), name, slots, **LINK)
    everything = LAYERS * EXPERTS
    assert report.hits == 19 * slots
    assert report.hit_rate == pytest.approx(slots / everything * 19 / 20)


@given(content=steps, name=st.sampled_from(sorted(POLICIES)), slots=st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_the_replay_says_what_the_cache_does(content: list[Any], name: str, slots: int) -> None:
    trace = make_trace(content)
    options = {"hot": [1, 7]} if name == "pinned" else {}
    report = replay(trace, name, slots, **LINK, options=options)
    policy = POLICIES[name](LAYERS, EXPERTS, options)
    cache = small_cache(slots=slots + 2, staging=2, host=12, policy=policy)
    for step in trace:
        cache.begin_pass(step.kind, step.rows)
        for route in step.routes:
            counts = np.bincount(route.ids.ravel(), minlength=EXPERTS)
            names = [str(number) for number in route.sequences]
            with cache.acquire(route.layer, counts, ids=route.ids, sequences=names) as lease:
                list(lease.groups())
    stats = cache.stats()
    cache.close()
    assert (stats.hits, stats.misses) == (report.hits, report.misses)
    assert (stats.evictions, stats.staged) == (report.evictions, report.staged)
    assert [layer.hits for layer in stats.layers] == list(report.hits_per_layer)


def sequence(number: int, length: int, prompt: bool = True) -> list[Step]:
    def route(layer: int, ids: list[list[int]]) -> Route:
        return Route(layer, np.array(ids), np.full(len(ids), number))

    first = [Step("sweep", 2, False, [route(0, [[number, 5], [0, 1]])])]
    rest = [Step("sweep", 2, True, [route(1, [[number, 5], [0, 1]])])]
    decode = [
        Step("decode", 1, False, [route(layer, [[number, at % EXPERTS]]) for layer in range(2)])
        for at in range(length)
    ]
    return (first + rest if prompt else []) + decode


def test_rebatching_regroups_sequences() -> None:
    recorded = sequence(0, 3) + sequence(1, 1) + sequence(2, 2)
    out = list(rebatch(recorded, 2))
    shape = [(step.kind, step.rows, [r.layer for r in step.routes]) for step in out]
    whole = [0, 1]
    assert shape == [
        ("sweep", 2, whole),
        ("sweep", 2, whole),
        ("decode", 2, whole),
        ("sweep", 2, whole),
        ("decode", 2, whole),
        ("decode", 2, whole),
    ]
    assert [step.finished for step in out] == [[], [], [1], [], [], [0, 2]]
    assert out[2].routes[1].ids.tolist() == [[0, 0], [1, 0]]
    assert out[4].routes[0].sequences.tolist() == [0, 2]
    assert out[4].routes[0].ids.tolist() == [[0, 1], [2, 0]]


@given(
    lengths=st.lists(st.integers(0, 4), max_size=5),
    batch=st.integers(1, 4),
    prompts=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_rebatching_loses_nothing(lengths: list[int], batch: int, prompts: bool) -> None:
    recorded = [s for n, length in enumerate(lengths) for s in sequence(n, length, prompts)]

    def rows(some: list[Step]) -> list[Any]:
        return sorted(
            (step.kind, route.layer, int(owner), ids.tolist())
            for step in some
            for route in step.routes
            for owner, ids in zip(route.sequences, route.ids, strict=True)
        )

    out = list(rebatch(recorded, batch))
    assert rows(out) == rows(recorded)
    assert all(step.rows <= batch for step in out if step.kind == "decode")
    again = [step for step in rebatch(out, 1) if step.kind == "decode"]
    assert sum(step.rows for step in again) == sum(lengths)


def test_a_long_prompt_stays_several_sweeps() -> None:
    """An engine marks a sweep when it opens it and resumes it for every part, the first too."""
    opened = Step("sweep", 2)
    parts = [
        Step("sweep", 2, True, [Route(layer, np.array([[at, 5]]), np.array([0]))])
        for at in range(2)
        for layer in range(LAYERS)
    ]
    out = list(
        rebatch([opened, *parts[:LAYERS], opened, *parts[LAYERS:], *sequence(0, 1, False)], 1)
    )
    assert [step.kind for step in out] == ["sweep", "sweep", "decode"]
    assert [[r.layer for r in step.routes] for step in out] == [[0, 1]] * 3


def test_rows_without_sequence_are_rebatched_by_row() -> None:
    unknown = Route(0, np.array([[0, 1], [2, 3]]), np.array([-1, -1]))
    out = list(rebatch([Step("decode", 2, False, [unknown])] * 3, 1))
    assert [step.routes[0].ids.tolist() for step in out] == [[[0, 1]]] * 3 + [[[2, 3]]] * 3


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch is 0"):
        replay(scan(1), "lru", 2, **LINK, batch=0)


def test_batch_is_reported_and_changes_the_working_set() -> None:
    recorded = Steps(HEADER, sequence(0, 6, False) + sequence(1, 6, False))
    alone = replay(recorded, "lru", 4, **LINK, batch=1)
    crowd = replay(recorded, "lru", 4, **LINK, batch=2)
    assert (alone.batch, crowd.batch) == (1, 2)
    assert crowd.hits + crowd.misses < alone.hits + alone.misses


@pytest.fixture
def path(tmp_path: Path) -> Path:
    trace = TraceWriter(tmp_path / "t", LAYERS, EXPERTS, TOP, "m", expert_bytes=1000)
    for at in range(6):
        trace.begin("decode", 1)
        for layer in range(LAYERS):
            trace.record(layer, np.array([[at % EXPERTS, (at + 1) % EXPERTS]]), ["s"])
    trace.close()
    return tmp_path / "t"


def test_main_prints_a_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(path, ["all"], ["50%", "3"], 1e9, False) == 0
    out = capsys.readouterr().out
    assert "2 layers of 6 experts" in out
    for name in POLICIES:
        assert out.count(name) >= 2
    assert out.count("belady (bound)") == 2


def test_main_prints_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(path, ["lru", "belady"], ["50%", "400%"], 1e6, True, batch=1) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [(r["policy"], r["slots"], r["batch"]) for r in reports] == [
        ("lru", 6, 1),
        ("belady", 6, 1),
        ("lru", 12, 1),
        ("belady", 12, 1),
    ]
    for report in reports:
        assert report["hits"] + report["misses"] == 24
        assert report["hit_rate"] == pytest.approx(report["hits"] / 24)
        assert report["exposed_seconds"] == pytest.approx(report["misses"] / 1000)


def test_main_says_when_sizes_are_unknown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(path, ["lru"], ["2"], 1e6, False, expert_bytes=0) == 0
    out = capsys.readouterr().out
    assert "does not say how large an expert is" in out
    assert "?" in out


@pytest.mark.parametrize(
    ("policies", "slots", "link", "message"),
    [
        (["lfru"], ["2"], 1.0, "no expert policy 'lfru'"),
        (["lru"], ["x%"], 1.0, "'x%' is neither"),
        (["lru"], ["two"], 1.0, "'two' is neither"),
        (["lru"], ["-1"], 1.0, "less than 0"),
        (["lru"], ["2"], 0.0, "moves nothing"),
    ],
)
def test_main_refuses_what_makes_no_sense(
    path: Path, policies: list[str], slots: list[str], link: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        main(path, policies, slots, link, False)
    assert str(error.value.param).startswith("--")


def test_table_sorts_by_size_then_hit_rate() -> None:
    reports = [replay(scan(4), name, slots, **LINK) for slots in (6, 2) for name in ("lru", "lfu")]
    shown = table(reports)
    assert list(shown.columns[0].cells) == ["2", "2", "6", "6"]
