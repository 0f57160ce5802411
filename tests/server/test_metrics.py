"""Public bug cases 48 and 54: /metrics and /admin/stats."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from moestro.server.histogram import Totals
from moestro.stats import EngineStats, ExpertStats, KVStats, SchedulerStats, TierStats
from tests.server.conftest import Make
from tests.server.metrics import samples, series


async def test_case_48_after_mass_aborts_the_numbers_are_right(listen: Make) -> None:
    async with listen("x" * 5000, engine={"delay": 0.001}) as server:
        before = await samples(server)

        async def cut() -> None:
            fields = {"prompt": "x", "stream": True, "max_tokens": 4000}
            async with server.client.stream("POST", "/v1/completions", json=fields) as response:
                await anext(response.aiter_bytes())

        await asyncio.gather(*(cut() for _ in range(50)))
        await server.idle()
        after = await samples(server)
        assert after[series("num_requests_running")] == 0
        assert after[series("num_requests_waiting")] == 0
        assert after[series("kv_cache_usage_perc")] == before[series("kv_cache_usage_perc")]
        aborted = series("request_success_total", finished_reason="abort")
        assert after[aborted] - before[aborted] == 50


async def test_case_48_counters_never_decrease(make: Make) -> None:
    async with make("hello") as server:
        last: dict[str, float] = {}
        for round in range(6):
            await server.chat(n=2)
            if round == 3:  # the engine process was restarted and counts from zero
                server.engine.totals = EngineStats()
                server.engine.restarts += 1
            now = await samples(server)
            for name, value in now.items():
                if re.search(r"_(total|count|bucket)\{", name):
                    assert value >= last.get(name, 0), name
            last = now
        # What the old process did after the last look at it is lost with it.
        assert last[series("generation_tokens_total")] == 5 * 2 * 6
        assert last[series("engine_restarts_total")] == 1


def test_a_new_engine_that_outran_the_old_one_adds_to_it() -> None:
    totals = Totals()
    assert totals.of("tokens", 10) == 10
    totals.begin_life(1)
    assert totals.of("tokens", 30) == 40
    totals.begin_life(1)
    assert totals.of("tokens", 31) == 41


async def test_metrics_of_requests(make: Make) -> None:
    async with make("hello") as server:
        now = await samples(server)
        for reason in ("stop", "length", "abort", "error"):
            assert now[series("request_success_total", finished_reason=reason)] == 0
        await server.chat()
        await server.chat(max_tokens=3, n=2, stop="zzz")
        await server.complete(stop="l")
        server.engine.fail_next = "x"
        await server.chat()
        now = await samples(server)
        counts = {"stop": 2, "length": 2, "abort": 0, "error": 1}
        for reason, count in counts.items():
            assert now[series("request_success_total", finished_reason=reason)] == count
        assert now[series("time_to_first_token_seconds_count")] == 4
        assert now[series("e2e_request_latency_seconds_count")] == 5
        assert now[series("request_generation_tokens_sum")] == 6 + 3 + 3 + 3
        assert now[series("inter_token_latency_seconds_count")] == 5 + 2 + 2 + 2
        assert now[series("request_params_n_bucket", le="1.0")] == 3
        assert now[series("request_params_n_bucket", le="+Inf")] == 4
        # The engine's own times come with its last event, which a stop string forestalls.
        assert now[series("request_queue_time_seconds_sum")] == pytest.approx(0.004)
        assert now[series("time_to_first_token_seconds_bucket", le="2560.0")] == 4


async def test_times_add_up(make: Make) -> None:
    async with make("hello", engine={"delay": 0.01}) as server:
        await server.chat()
        now = await samples(server)
        first = now[series("time_to_first_token_seconds_sum")]
        between = now[series("inter_token_latency_seconds_sum")]
        whole = now[series("e2e_request_latency_seconds_sum")]
        assert 0.04 < between < whole
        assert first + between == pytest.approx(whole, abs=0.02)
        each = now[series("request_time_per_output_token_seconds_sum")]
        assert each == pytest.approx(between / 5)


async def test_metrics_of_the_engine(make: Make) -> None:
    async with make("hello", settings={"metrics_prefix": "vllm:"}) as server:
        server.engine.totals = EngineStats(
            scheduler=SchedulerStats(prompt_tokens=5),
            kv=KVStats(prefix_queries=4, prefix_hits=3),
            experts=ExpertStats(
                hits=10,
                misses=2,
                evictions=1,
                exposed_seconds=0.5,
                fetch_seconds=1.5,
                slots=TierStats(capacity=8, resident=6, hits=10, bytes_read=0),
                host=TierStats(capacity=16, resident=12, hits=2, bytes_read=4096),
                fetch_latency_buckets={"0.001": 1, "0.01": 2, "inf": 1},
            ),
            step_tokens=[1, 8, 9],
        )
        now = {k.replace("vllm:", "moestro:"): v for k, v in (await samples(server)).items()}
        assert now[series("expert_hits_total")] == 10
        assert now[series("expert_misses_total")] == 2
        assert now[series("expert_evictions_total")] == 1
        assert now[series("expert_exposed_fetch_seconds_total")] == 0.5
        assert now[series("expert_bytes_total", tier="host")] == 4096
        assert now[series("resident_experts", tier="slots")] == 6
        assert now[series("expert_fetch_latency_seconds_bucket", le="0.01")] == 3
        assert now[series("expert_fetch_latency_seconds_bucket", le="+Inf")] == 4
        assert now[series("expert_fetch_latency_seconds_sum")] == 1.5
        assert now[series("iteration_tokens_total_count")] == 3
        assert now[series("iteration_tokens_total_bucket", le="8.0")] == 2
        await samples(server)
        again = {k.replace("vllm:", "moestro:"): v for k, v in (await samples(server)).items()}
        assert again[series("iteration_tokens_total_count")] == 3


async def test_admin_stats(make: Make) -> None:
    async with make("hello") as server:
        body = (await server.client.get("/admin/stats")).json()
        assert (body["state"], body["live_calls"]) == ("ready", 0)
        assert body["info"]["vocab_size"] == 512
        assert body["stats"]["scheduler"]["running"] == 0
        assert body["stats"]["experts"]["layers"] == []


async def test_case_54_clients_choose_no_labels(make: Make) -> None:
    async with make("x") as server:
        await server.client.get("/warm/up")
        await server.complete(model="warm-up")
        await server.client.request("BREW", "/warm")
        before = await samples(server)
        for i in range(150):
            await server.client.get(f"/random/{i}")
            await server.complete(model=f"model-{i}")
            await server.client.get(f"/v1/models/{i}", headers={"x-request-id": f"id-{i}"})
            await server.client.request(f"BREW{i}", "/")
        after = await samples(server)
        extra = set(after) - set(before)
        assert {name.split("{")[0] for name in extra} <= {"http_requests_total"}
        assert len(extra) <= 3
        assert 'handler="unmatched"' in "".join(after)
        assert not [name for name in after if re.search(r"random|model-|id-\d|BREW", name)]
        started = time.monotonic()
        await samples(server)
        assert time.monotonic() - started < 0.2
