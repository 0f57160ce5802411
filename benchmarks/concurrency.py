"""How much do 16 streams together get out of the server, against one, and against transformers?

Rounds are interleaved (one stream, 16 streams, transformers, then again), so that a busy neighbour
hits all three. Reported are medians, and the median of each round's ratios. Transformers runs
continuous batching (`generate_batch`) of the same prompts on the same checkpoint, with all the
machine's cores and with a KV pool of about the size that is needed: with its own default, which
takes most of the memory, it is slower. Its loading and its warm-up are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import load, report
from tests.oracle.serving import Served, serve

ENOUGH_PARALLEL = 4.0  # tokens/s of all streams over tokens/s of one
ENOUGH_AHEAD = 2.0  # tokens/s over transformers'


class Transformers:
    """Continuous batching by transformers over a checkpoint."""

    def __init__(self, checkpoint: Path, streams: int, length: int, page: int = 64) -> None:
        # Loaded late, since it takes seconds; Any, since its types promise too much.
        library: Any = importlib.import_module("transformers")
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        model = library.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
        self._library = library
        self._model = model.eval()
        blocks = 2 * streams * -(-length // page)
        self._pool = library.ContinuousBatchingConfig(
            page_size=page, num_blocks=blocks, max_batch_tokens=max(512, streams * length // 2)
        )

    def run(self, prompts: list[list[int]], tokens: int) -> float:
        """Tokens a second over all prompts together."""
        settings = self._library.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        started = time.monotonic()
        outputs = self._model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=self._pool
        )
        took = time.monotonic() - started
        made = sum(len(output.generated_tokens) for output in outputs.values())
        if made != tokens * len(prompts):
            raise RuntimeError(f"transformers made {made} tokens, not {tokens * len(prompts)}")
        return made / took


async def ours(served: Served, prompts: list[list[int]], tokens: int) -> float:
    """Tokens a second over all prompts together, through the front door."""
    streams, took = await load.together(
        served.port, [load.completion(prompt, tokens) for prompt in prompts]
    )
    return sum(one.tokens for one in streams) / took


def measure(arguments: argparse.Namespace, model: Path, log: Path) -> dict[str, list[float]]:
    """Tokens a second of every round."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    rounds: dict[str, list[float]] = {"one": [], "many": [], "transformers": []}
    length = arguments.prompt + arguments.tokens
    other = Transformers(model, arguments.streams, length) if not arguments.alone else None
    flags = ["--no-enable-prefix-caching", *arguments.flags]
    with serve(model, *flags, log=log, threads=arguments.threads) as served:
        for number in range(-1, arguments.rounds):  # round -1 warms up
            prompts = load.random_prompts(vocab, arguments.streams, arguments.prompt, number)
            found = {
                "one": asyncio.run(ours(served, prompts[:1], arguments.tokens)),
                "many": asyncio.run(ours(served, prompts, arguments.tokens)),
            }
            if other is not None:
                found["transformers"] = other.run(prompts, arguments.tokens)
            print(number, {name: round(value, 1) for name, value in found.items()}, flush=True)
            if number >= 0:
                for name, value in found.items():
                    rounds[name].append(value)
    return rounds


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: a random demo-sized one)")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=40, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads of our engine")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("flags", nargs="*", help="more flags for the server, after --")
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        model = arguments.model or load.demo_sized(work)
        rounds = measure(arguments, model, work / "server.log")
    many = rounds["many"]
    rows = [
        (f"{name}, tokens/s", report.spread(values)) for name, values in rounds.items() if values
    ]
    parallel = [m / o for m, o in zip(many, rounds["one"], strict=True)]
    bars = [report.Bar("all streams over one", median(parallel), ENOUGH_PARALLEL, "x", True)]
    if rounds["transformers"]:
        ahead = [m / t for m, t in zip(many, rounds["transformers"], strict=True)]
        bars.append(report.Bar("ours over transformers", median(ahead), ENOUGH_AHEAD, "x", True))
    return report.finish(arguments, rows, bars, {"tokens_per_second": rounds})


if __name__ == "__main__":
    sys.exit(main())
