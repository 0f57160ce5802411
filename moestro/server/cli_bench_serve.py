"""`moestro bench serve`: drives a running server.

Owns: its flags, what is asked of the server beside the load (its model, its counters), and the
report. Does not own: the streams (`cli_bench_load`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moestro.config_values import ENV_PREFIX
from moestro.engine.bench_figures import (
    Link,
    Phase,
    bound,
    counts_between,
    estimated_floor,
    spread,
)
from moestro.errors import ConfigError, MoestroError
from moestro.server.cli_bench_client import Server, fetched, server_of
from moestro.server.cli_bench_flags import STDOUT, check_json, only_flags, serve_parser
from moestro.server.cli_bench_load import Pace, Stream, run_load
from moestro.server.cli_bench_prompts import Ask, Shape, random_asks, recorded_asks
from moestro.server.cli_bench_report import bound_json, counts_json, head, put_json
from moestro.server.cli_bench_show_serve import show_served
from moestro.stats import EngineStats

URL = "http://127.0.0.1:8000"
REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """A load that can be sent once the server has said what it serves."""

    server: Server
    model: str | None
    pace: Pace
    output_len: int
    count: int | None
    shape: Shape | None  # None: `recorded`
    recorded: tuple[Ask, ...]
    vocab: int | None
    link: Link | None
    json: Path | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server says of itself; None where it does not."""

    model: str
    context: int | None
    vocab: int | None


def serve_command(words: Sequence[str]) -> Callable[[], int]:
    """The load that `words` ask for. Raises ConfigError."""
    plan = _plan(only_flags(serve_parser(), words))
    return lambda: _run(plan)


def _plan(values: dict[str, Any]) -> Plan:
    if "request_rate" in values and "concurrency" in values:
        raise ConfigError(
            "--request-rate and --concurrency: one or the other paces the load", param="concurrency"
        )
    for flag in ("input_len", "shared_prefix", "vocab"):
        if "dataset" in values and flag in values:
            name = "--" + flag.replace("_", "-")
            raise ConfigError(f"{name} is for random prompts, not for --dataset", param=flag)
    check_json(values.get("json"))
    key = values.get("api_key") or os.environ.get(ENV_PREFIX + "API_KEY", "").split(",")[0].strip()
    output_len, count = values.get("output_len", 128), values.get("num_prompts")
    dataset, rate = values.get("dataset"), values.get("link_gbps")
    recorded = () if dataset is None else tuple(recorded_asks(dataset, count, output_len))
    shape = Shape(values.get("input_len", 64), values.get("shared_prefix", 0))
    return Plan(
        server=server_of(values.get("base_url", URL), key or None),
        model=values.get("model"),
        pace=Pace(values.get("request_rate"), values.get("concurrency", 1), values.get("seed", 0)),
        output_len=output_len,
        count=count,
        shape=shape if dataset is None else None,
        recorded=recorded,
        vocab=values.get("vocab"),
        link=None if rate is None else Link(rate * 1e9, "as --link-gbps says"),
        json=values.get("json"),
    )


def _run(plan: Plan) -> int:
    result = head("serve") | asyncio.run(measure_served(plan))
    show_served(result, to=sys.stderr if plan.json == STDOUT else sys.stdout)
    put_json(result, plan.json)
    return 1 if result["failed"] else 0


async def measure_served(
    plan: Plan, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Send the load and report. Raises MoestroError when the server cannot take it."""
    facts = await ask_facts(plan.server, plan.model)
    asks = make_asks(plan, facts)
    before = await _stats(plan.server)
    began = clock()
    streams = await run_load(plan.server, facts.model, asks, plan.pace, clock)
    took = clock() - began
    after = await _stats(plan.server)
    failed = [stream.error for stream in streams if stream.error is not None]
    if len(failed) == len(streams):
        raise MoestroError(f"all {len(failed)} requests failed; the first: {failed[0]}")
    return {
        "model": facts.model,
        "load": _load_json(plan, len(asks)),
        "seconds": took,
        "failed": len(failed),
        "first_error": failed[0] if failed else None,
        **_client_side(streams, took),
        **_server_side(plan, before, after, took),
    }


async def ask_facts(server: Server, model: str | None) -> Facts:
    """The model to ask for and what limits it. Raises MoestroError."""
    listed = (await fetched(server, "/v1/models"))["data"]
    names = [one["id"] for one in listed]
    if model is not None and model not in names:
        raise ConfigError(
            f"the server has no model {model}, only {', '.join(names)}", param="model"
        )
    if not names:
        raise MoestroError("the server lists no model")
    one = listed[names.index(model) if model is not None else 0]
    try:
        info = (await fetched(server, "/admin/stats")).get("info") or {}
    except MoestroError:  # some other server
        info = {}
    return Facts(one["id"], one.get("max_model_len"), info.get("vocab_size"))


def make_asks(plan: Plan, facts: Facts) -> list[Ask]:
    """The requests. Raises ConfigError when they cannot fit the model."""
    if plan.shape is None:
        return list(plan.recorded)
    tokens = plan.shape.tokens + plan.output_len
    if facts.context is not None and tokens > facts.context:
        raise ConfigError(
            f"prompts of {plan.shape.tokens} and answers of {plan.output_len} make {tokens} "
            f"tokens, but the model's context is {facts.context} tokens",
            param="input_len",
        )
    vocab = plan.vocab or facts.vocab
    if vocab is None:
        raise ConfigError("the server does not say its vocabulary: give --vocab", param="vocab")
    count = plan.count or REQUESTS
    return random_asks(plan.shape, count, plan.output_len, vocab, plan.pace.seed)


def _load_json(plan: Plan, count: int) -> dict[str, Any]:
    shape = plan.shape
    return {
        "requests": count,
        "prompts": "dataset" if shape is None else "shared prefix" if shape.shared else "random",
        "input_len": None if shape is None else shape.input_len,
        "shared_prefix": None if shape is None else shape.shared,
        "output_len": plan.output_len,
        "request_rate": plan.pace.rate,
        "concurrency": None if plan.pace.rate is not None else plan.pace.concurrency,
        "seed": plan.pace.seed,
    }


def _client_side(streams: Sequence[Stream], took: float) -> dict[str, Any]:
    """Prefill and decode as the clients saw them; failed streams are left out."""
    good = [stream for stream in streams if stream.error is None]
    prompts = sum(stream.prompt_tokens for stream in good)
    tokens = sum(stream.tokens for stream in good)
    first = [stream.first for stream in good if stream.first is not None]
    return {
        "requests_per_second": len(good) / took,
        "prefill": {
            "tokens": prompts,
            "tokens_per_second": prompts / took,
            "time_to_first_token": spread(first),
        },
        "decode": {
            "tokens": tokens,
            "tokens_per_second": tokens / took,
            "gap": spread([gap for stream in good for gap in stream.gaps]),
        },
    }


async def _stats(server: Server) -> EngineStats | None:
    """The engine's counters, when this server has them."""
    try:
        found = (await fetched(server, "/admin/stats"))["stats"]
        return msgspec.convert(found, EngineStats)
    except (MoestroError, KeyError, TypeError, msgspec.ValidationError):
        return None


def _server_side(
    plan: Plan, before: EngineStats | None, after: EngineStats | None, took: float
) -> dict[str, Any]:
    """What the engine counted meanwhile, and its bound over the whole run."""
    if before is None or after is None:
        return {"engine": None, "bound": None}
    counts = counts_between(before, after)
    old, new = before.scheduler, after.scheduler
    engine = {
        "decode_steps": new.decode_steps - old.decode_steps,
        "sweeps": new.sweeps - old.sweeps,
        "swept_tokens": new.swept_tokens - old.swept_tokens,
        "prefix_hit_tokens": after.kv.prefix_hits - before.kv.prefix_hits,
        "preemptions": new.preemptions - old.preemptions,
        "cache": counts_json(counts),
    }
    link = plan.link
    if link is None and plan.server.local:
        link = _measured_link()
    if link is None:
        return {"engine": engine, "bound": None}
    whole = Phase(took, 0, 1, counts)  # as one long step
    return {"engine": engine, "bound": bound_json(bound(whole, estimated_floor(whole), link))}


def _measured_link() -> Link:
    """After the load, so that neither disturbs the other."""
    from moestro.engine.bench_link import measure_link

    return measure_link(None)
