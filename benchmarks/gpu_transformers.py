"""Tokens a second on one GPU beside transformers, same weights, all experts on the device.

The checkpoint of `gpu_disk` (12 layers). `generate` and `generate_batch` (continuous batching) run
in the same process after our engine is closed. Greedy, prompts of 64 tokens, the same count of new
tokens for everybody; time to first token is part of every figure.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks import report
from benchmarks.gpu_peers import VOCAB, prompt
from benchmarks.gpu_shapes import SHAPES, Shape
from moestro.config import Config
from moestro.engine.build import build_engine
from moestro.types import Request, SamplingParams

Rates = dict[int, float]  # streams -> tokens a second


def ours(shape: Shape, path: Path, streams: list[int], tokens: int) -> Rates:
    """Our engine, in this process."""
    config = Config(
        device="cuda",
        expert_slots=shape.layers * shape.experts,
        host_memory=shape.layers * shape.experts * shape.blob,
        max_num_seqs=max(streams),
        kv_cache_tokens=max(streams) * (64 + tokens + 64),
        max_model_len=4096,
        enable_prefix_caching=False,
    )
    engine = build_engine(config, path)
    engine.finish_fill()
    found: Rates = {}
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    for count in streams:
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            for number in range(count):
                engine.add(Request(f"r{number}", prompt(64, number), params))
            while not engine.idle:
                engine.step()
            found[count] = count * tokens / (time.perf_counter() - began)
    engine.close()
    return found


def generate(model: Any, streams: list[int], tokens: int) -> Rates:
    """transformers' `generate` on a padded batch."""
    found: Rates = {}
    for count in streams:
        ids = torch.tensor([prompt(64, number) for number in range(count)], device="cuda")
        for _ in range(2):
            began = time.perf_counter()
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
            torch.cuda.synchronize()
            found[count] = count * tokens / (time.perf_counter() - began)
    return found


def continuous(model: Any, streams: list[int], tokens: int) -> Rates:
    """transformers' continuous batching."""
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    found: Rates = {}
    for count in streams:
        prompts = [list(prompt(64, number)) for number in range(count)]
        for _ in range(2):
            began = time.perf_counter()
            outputs = model.generate_batch(prompts, generation_config=config)
            took = time.perf_counter() - began
            made = sum(len(output.generated_tokens) for output in outputs.values())
            assert made == count * tokens, (made, count * tokens)
            found[count] = made / took
    return found


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    shape = replace(SHAPES["qwen3"], layers=arguments.layers, vocab=VOCAB)
    streams, tokens = arguments.streams, arguments.tokens
    with report.workplace(arguments) as work:
        path = work / "checkpoint"
        if not (path / "model.safetensors.index.json").exists():
            shape.write_checkpoint(path, "cuda", half=True)
        mine = ours(shape, path, streams, tokens)
        print("ours", mine, flush=True)
        torch.cuda.empty_cache()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cuda").eval()
        plain = generate(model, streams, tokens)
        print("generate", plain, flush=True)
        batched = continuous(model, streams, tokens)
    rows = [
        (
            f"{count} streams, tokens/s",
            f"ours {mine[count]:.0f}, generate {plain[count]:.0f} "
            f"({mine[count] / plain[count]:.1f} x), generate_batch {batched[count]:.0f} "
            f"({mine[count] / batched[count]:.1f} x)",
        )
        for count in streams
    ]
    return report.finish(arguments, rows, [], {"ours": mine, "generate": plain, "batch": batched})


if __name__ == "__main__":
    sys.exit(main())
