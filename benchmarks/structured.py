"""What does it cost to hold 16 streams to a JSON schema?

Rounds alternate: 16 completions under a schema, then the same prompts without one, each for exactly
as many tokens as its answer under the schema had. Reported are tokens a second of both, the median
of each round's ratio, and how many answers validate: all of them must.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema

from benchmarks import load, report
from moestro.demo import demo_path
from tests.oracle.serving import Served, serve

ENOUGH = 0.9  # tokens/s under a schema over tokens/s without
ENTRY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "name": {"type": "string", "minLength": 4, "maxLength": 16},
        "kind": {"enum": ["lamp", "keeper", "stair", "storm"]},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "done": {"type": "boolean"},
    },
    "required": ["id", "name", "kind", "score", "done"],
    "additionalProperties": False,
}


def schema(entries: int) -> dict[str, Any]:
    """An array of so many entries: every answer is long, and all are of about the same length."""
    return {"type": "array", "items": ENTRY, "minItems": entries, "maxItems": entries}


def valid(text: str, wanted: dict[str, Any]) -> bool:
    """Whether an answer is JSON that fits."""
    try:
        jsonschema.validate(json.loads(text), wanted)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def one_round(
    served: Served, prompts: list[list[int]], wanted: dict[str, Any], most: int, seed: int
) -> dict[str, Any]:
    """The same prompts with the schema and without."""
    heat = {"temperature": 0.7, "seed": seed}
    held = {**heat, "guided_json": wanted, "ignore_eos": False}
    answers, took = await load.together(
        served.port, [load.completion(prompt, most, **held) for prompt in prompts]
    )
    free, free_took = await load.together(
        served.port,
        [
            load.completion(prompt, answer.tokens, **heat)
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    )
    return {
        "held": sum(answer.tokens for answer in answers) / took,
        "free": sum(answer.tokens for answer in free) / free_took,
        "tokens": [answer.tokens for answer in answers],
        "valid": sum(valid(answer.text, wanted) for answer in answers),
    }


def measure(arguments: argparse.Namespace, model: Path, log: Path) -> list[dict[str, Any]]:
    """Every round's figures."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    wanted = schema(arguments.entries)
    flags = ["--no-enable-prefix-caching", *arguments.flags]
    rounds = []
    with serve(
        "" if model == demo_path() else model, *flags, log=log, threads=arguments.threads
    ) as served:
        for number in range(-1, arguments.rounds):  # round -1 warms up
            prompts = load.random_prompts(min(vocab, 256), arguments.streams, 40, number)
            found = asyncio.run(one_round(served, prompts, wanted, arguments.most, number + 1))
            print(number, {k: round(found[k], 1) for k in ("held", "free", "valid")}, flush=True)
            if number >= 0:
                rounds.append(found)
    return rounds


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, default=demo_path(), help="checkpoint")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--entries", type=int, default=2, help="objects in each answer")
    parser.add_argument("--most", type=int, default=1000, help="tokens that an answer may have")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("flags", nargs="*", help="more flags for the server, after --")
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        rounds = measure(arguments, arguments.model, work / "server.log")
    answers = arguments.streams * len(rounds)
    rows = [
        ("under a schema, tokens/s", report.spread([found["held"] for found in rounds])),
        ("without, tokens/s", report.spread([found["free"] for found in rounds])),
        ("tokens of an answer", report.spread([n for found in rounds for n in found["tokens"]])),
    ]
    ratio = median(found["held"] / found["free"] for found in rounds)
    bars = [
        report.Bar("under a schema over without", ratio, ENOUGH, "x", at_least=True),
        report.Bar(
            "answers that validate",
            sum(found["valid"] for found in rounds),
            answers,
            f"of {answers}",
            at_least=True,
        ),
    ]
    return report.finish(arguments, rows, bars, {"rounds": rounds})


if __name__ == "__main__":
    sys.exit(main())
