"""Write the demo checkpoint's model card from measured figures.

    python -m tools.train_demo.card --model moestro/demo/model \\
        --scores scores.json --routing routing.json

`--scores` is an --out file of evaluate.py, `--routing` one of routing.py. The text around the
figures is card_template.md. What training cost stands there as text too: only the run that made the
weights knew it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from safetensors import safe_open

from .words import CAPITALS

ABOUT = {
    "add": "sum of two numbers below 100",
    "subtract": "difference of two numbers below 100, some of them negative",
    "backwards": "a word spelled backwards, real or invented",
    "sort": "two to five words in alphabetical order",
    "count": "how often a letter stands in a word; how long a word is",
    "units": "whole amounts in a smaller unit",
    "capitals": f"{len(CAPITALS)} capitals; countries that do not exist are declined",
    "facts": "yes or no: capitals, kinds of things, comparing numbers, odd and even",
    "sequence": "counting up or down",
    "field": "one value out of a short text",
    "json": "values of a short text as a JSON object",
    "talk": "small talk, and declining what is too hard",
    "memory": "name, city and color that the user told earlier",
}

TEMPLATE = Path(__file__).with_name("card_template.md")


def _describe_routing(routing: dict[str, Any]) -> dict[str, Any]:
    answers, whole = routing["answers"], routing["conversations"]
    distance: dict[str, float] = answers["distance"]
    nearest = min(distance, key=distance.__getitem__)
    farthest = max(distance, key=distance.__getitem__)
    single = answers["busiest_quarter_of_a_task"].values()
    return {
        "low": distance[nearest],
        "low_pair": nearest.replace(" ", " and "),
        "high": distance[farthest],
        "high_pair": farthest.replace(" ", " and "),
        "mean": mean(distance.values()),
        "mixed_low": 100 * min(answers["busiest_quarter"]),
        "mixed_high": 100 * max(answers["busiest_quarter"]),
        "one_low": 100 * min(single),
        "one_high": 100 * max(single),
        "all_mean": mean(whole["distance"].values()),
        "all_low": 100 * min(whole["busiest_quarter"]),
        "all_high": 100 * max(whole["busiest_quarter"]),
    }


def _count_parameters(weights: Path) -> int:
    with safe_open(weights, "pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118


def write_card(model: Path, scores: dict[str, Any], routing: dict[str, Any]) -> str:
    """The card's text."""
    weights = model / "model.safetensors"
    config = json.loads((model / "config.json").read_text())
    trials = Counter(answer["task"] for answer in scores["answers"])
    rows = [
        f"| {task} | {right:.1f} % | {ABOUT[task]} |" for task, right in scores["scores"].items()
    ]
    return TEMPLATE.read_text().format(
        **config,
        **_describe_routing(routing),
        parameters=_count_parameters(weights) / 1e6,
        megabytes=weights.stat().st_size / 1e6,
        count=min(trials.values()),
        rows="\n".join(rows),
    )


def main() -> None:
    """Write README.md into the checkpoint's folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--routing", type=Path, required=True)
    asked = parser.parse_args()
    scores, routing = json.loads(asked.scores.read_text()), json.loads(asked.routing.read_text())
    (asked.model / "README.md").write_text(write_card(asked.model, scores, routing))


if __name__ == "__main__":
    main()
