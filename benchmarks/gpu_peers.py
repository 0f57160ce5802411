"""Tokens a second on one GPU in the shape that peers were measured in, at parts of the experts.

The shape of Qwen3-30B-A3B cut to 12 layers (vocabulary 32,000, bf16, 15.2 GB), random weights,
prompts of 64 tokens, greedy tokens scrambled. Resident are the experts in slots that are kept:
ring and staging come on top. The engine runs in this process. Prompts are computed first, then
decode steps are timed: median and mean step, and what each fetched.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks import report
from moestro.config import Config
from moestro.engine.build import build_engine
from moestro.engine.engine import Engine
from moestro.engine.synthetic import Synthetic
from moestro.types import Request, SamplingParams

VOCAB = 32_000
EXPERTS, TOP_K, BLOB = 128, 8, 3 * 2048 * 768 * 2


def model(folder: Path, layers: int, vocab: int) -> Path:
    """Write the config of the shape."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "norm_topk_prob": True,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def slots_for(resident: float, layers: int, rows: int) -> int:
    """Slots in all so that this part of the experts is kept beside ring and staging."""
    every = layers * EXPERTS
    kept = int(every * resident)
    if kept >= every:
        return every
    staging = 24
    ring = min(EXPERTS, rows * TOP_K, kept // 5)
    return kept + staging + ring


def prompt(count: int, seed: int) -> tuple[int, ...]:
    """Random tokens."""
    draw = random.Random(seed)
    return tuple(draw.randrange(3, VOCAB) for _ in range(count))


def decode(engine: Engine, streams: int, warm: int, steps: int, tag: str) -> dict[str, float]:
    """Run streams side by side; times of the steps after the first `warm`."""
    params = SamplingParams(max_tokens=warm + steps + 2, temperature=0.0)
    for number in range(streams):
        engine.add(Request(f"{tag}-{number}", prompt(64, number), params))
    times: list[float] = []
    before = engine.stats().experts
    seen = 0
    while not engine.idle:
        tokens = len(engine.step())
        if tokens < streams:
            continue
        seen += 1
        if seen == warm:
            before = engine.stats().experts
        if seen >= warm:
            times.append(time.perf_counter())
    after = engine.stats().experts
    gaps = [b - a for a, b in itertools.pairwise(times)][: steps - 1]
    fetched = (after.misses - before.misses) / max(1, len(times) - 1)
    used = fetched + (after.hits - before.hits) / max(1, len(times) - 1)
    exposed = (after.exposed_seconds - before.exposed_seconds) / max(1, len(times) - 1)
    return {
        "streams": streams,
        "ms": 1e3 * median(gaps),
        "mean_ms": 1e3 * mean(gaps),
        "tokens_s": streams / mean(gaps),
        "fetched": fetched,
        "used": used,
        "GB": fetched * BLOB / 1e9,
        "GB_s": fetched * BLOB / 1e9 / max(exposed, 1e-9),
        "exposed_ms": 1e3 * exposed,
    }


def sweep(engine: Engine, tokens: int, seed: int) -> tuple[float, int]:
    """Seconds until the first token of a prompt, and what was fetched for it."""
    before = engine.stats().experts.misses
    started = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add(Request(f"sweep-{tokens}-{seed}", prompt(tokens, 1000 + seed), params))
    while not engine.idle:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - started, engine.stats().experts.misses - before


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--resident", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="*", default=[8, 8192])
    parser.add_argument("--warm", type=int, default=64)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--policy", default="lru_frequency")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        path = model(work / "shape", arguments.layers, arguments.vocab)
        for resident in arguments.resident:
            run(arguments, path, resident)
    return 0


def run(arguments: argparse.Namespace, path: Path, resident: float) -> None:
    """One residency."""
    rows = max(arguments.streams)
    started = time.perf_counter()
    config = Config(
        device="cuda",
        load_format="dummy",
        expert_slots=slots_for(resident, arguments.layers, rows),
        max_num_seqs=rows,
        kv_cache_tokens=65536,
        max_model_len=32768,
        expert_policy=arguments.policy,
        enable_prefix_caching=False,
        trace=arguments.trace,
    )
    engine = build_engine(config, path, synthetic=Synthetic(scramble=True))
    took = time.perf_counter() - started
    used = torch.cuda.mem_get_info()
    print(f"resident {resident:.0%}: start {took:.1f} s, {engine.info.memory}", flush=True)
    print(f"  device memory in use {(used[1] - used[0]) / 2**20:.0f} MiB; {engine.info.notes}")
    for streams in arguments.streams:
        one = decode(engine, streams, arguments.warm, arguments.steps, f"{resident}")
        print(
            "  {streams:.0f} streams: step {ms:.3f} ms (mean {mean_ms:.3f}), {tokens_s:.0f} tok/s, "
            "{used:.0f} experts, {fetched:.1f} fetched = {GB:.3f} GB in {exposed_ms:.2f} ms "
            "({GB_s:.1f} GB/s)".format(**one),
            flush=True,
        )
    for tokens in arguments.prompts:
        for seed in range(3):
            seconds, fetched = sweep(engine, tokens, seed)
            print(
                f"  prompt of {tokens}: {1e3 * seconds:.1f} ms, {tokens / seconds:.0f} tok/s, "
                f"{fetched} experts fetched",
                flush=True,
            )
    engine.check()
    engine.close()
    del engine
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
