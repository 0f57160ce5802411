"""`moestro bench latency` and `throughput`: an engine in this process.

Owns: from flags to loads, what is refused before anything is loaded, and the report. Does not
own: the measurement (`engine.bench`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro import log
from moestro.config import Config, load
from moestro.engine.bench_figures import Link, Load
from moestro.engine.synthetic import Synthetic, parse_routing
from moestro.errors import ConfigError
from moestro.server.cli_bench_flags import (
    add_batch,
    add_batch_sizes,
    check_json,
    engine_parser,
    refuse_server_flags,
)
from moestro.server.cli_bench_report import head, measured_json, put_json
from moestro.server.cli_bench_show import show_measured
from moestro.server.cli_flags import Parser, config_flags
from moestro.server.cli_model import resolve

BATCH_SIZES = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Plan:
    """A benchmark that can run."""

    kind: str
    config: Config
    loads: tuple[Load, ...]
    synthetic: Synthetic
    link: Link | None
    json: Path | None


def latency_command(words: Sequence[str]) -> Callable[[], int]:
    """The run that `words` ask for. Raises ConfigError."""
    text = "Time to the first token and between tokens, of one batch in this process."
    parser = engine_parser("latency", text)
    add_batch(parser)
    plan = _plan("latency", parser, words, repeat=3)
    return lambda: _run(plan)


def throughput_command(words: Sequence[str]) -> Callable[[], int]:
    """The runs that `words` ask for. Raises ConfigError."""
    text = "Tokens a second over batch sizes, in this process."
    parser = engine_parser("throughput", text)
    add_batch_sizes(parser)
    plan = _plan("throughput", parser, words, repeat=1)
    return lambda: _run(plan)


def _plan(kind: str, parser: Parser, words: Sequence[str], repeat: int) -> Plan:
    values = config_flags(parser, words)
    refuse_server_flags(values)
    mine = {name: values.pop(name) for name in list(values) if name not in Config.model_fields}
    check_json(mine.get("json"))
    config = load(values)
    batches = (
        mine.get("batch_sizes", BATCH_SIZES) if kind == "throughput" else (mine.get("batch", 1),)
    )
    loads = tuple(
        Load(
            batch=batch,
            input_len=mine.get("input_len", 64),
            output_len=mine.get("output_len", 128),
            repeat=mine.get("repeat", repeat),
            warmup=mine.get("warmup", 1),
            seed=config.seed,
        )
        for batch in batches
    )
    rate = mine.get("link_gbps")
    link = None if rate is None else Link(rate * 1e9, "as --link-gbps says")
    return Plan(kind, config, loads, _synthetic(config, mine), link, mine.get("json"))


def _synthetic(config: Config, mine: dict[str, Any]) -> Synthetic:
    routing, keep = mine.get("routing"), mine.get("keep", 0.0)
    scramble = mine.get("scramble", config.load_format == "dummy")
    if routing is None:
        if keep:
            raise ConfigError("--keep needs a --routing to draw from", param="keep")
        return Synthetic(scramble=scramble, seed=config.seed)
    law = parse_routing(routing)
    if isinstance(law, Path):
        if keep:
            raise ConfigError("--keep goes with uniform and zipf, not with replay", param="keep")
        if not law.is_file():
            raise ConfigError(f"no trace file {law}", param="routing")
    return Synthetic(scramble, routing, keep, config.seed)


def _run(plan: Plan) -> int:
    log.setup(plan.config.log_level, form=plan.config.log_format)
    model = resolve(plan.config)
    from moestro.engine.build import describe

    limits = describe(plan.config, model.path)
    for one in plan.loads:
        check_load(one, plan.config.max_num_seqs, limits["max_model_len"], limits["kv_tokens"])
    result = head(plan.kind, plan.config) | {
        "model": model.names[0],
        "synthetic": {
            "routing": plan.synthetic.routing,
            "keep": plan.synthetic.keep,
            "scramble": plan.synthetic.scramble,
            "seed": plan.synthetic.seed,
        },
        "slots": limits["slots"],
        "experts": limits["experts"],
    }
    from moestro.engine.bench import measure

    found = measure(
        plan.config, model.path, plan.loads, plan.synthetic, link=plan.link, progress=_progress()
    )
    result["results"] = [measured_json(one) for one in found]
    show_measured(result, to=sys.stderr if plan.json == Path("-") else sys.stdout)
    put_json(result, plan.json)
    return 0


def check_load(load: Load, max_num_seqs: int, context: int, kv_tokens: int) -> None:
    """Raise ConfigError for a load that the engine would refuse, queue or preempt."""
    if load.tokens > context:
        raise ConfigError(
            f"--input-len {load.input_len} and --output-len {load.output_len} make {load.tokens} "
            f"tokens, but the context is {context} tokens",
            param="input_len",
        )
    if load.batch > max_num_seqs:
        raise ConfigError(
            f"a batch of {load.batch} is more than --max-num-seqs, {max_num_seqs}", param="batch"
        )
    if load.batch * load.tokens > kv_tokens:
        raise ConfigError(
            f"a batch of {load.batch} with {load.tokens} tokens each is "
            f"{load.batch * load.tokens} tokens, but the KV cache holds {kv_tokens}: "
            "raise --kv-cache-tokens",
            param="kv_cache_tokens",
        )


def _progress() -> Callable[[str, int, int], None]:
    """Says each stage once, on standard error."""
    said: set[tuple[str, int]] = set()

    def progress(stage: str, done: int, total: int) -> None:
        counted = total if total < 1000 else 0  # else bytes: too many to say each
        line = f"{stage} {done + 1} of {total}" if counted else stage
        if (line, counted) not in said:
            said.add((line, counted))
            print(line, file=sys.stderr, flush=True)

    return progress
