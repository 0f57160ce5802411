"""How the demo model's experts share the work: which experts each task uses, layer by layer.

    python -m tools.train_demo.routing --model moestro/demo/model --out routing.json

Counts the router's choices on held-out questions and right answers, in transformers: where the
answer is computed, and over the whole conversation, whose framing all tasks share. A task's use of
a layer is the share of its routes that each expert takes.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from .chat import encode
from .data import draw, to_messages
from .tasks import TASKS

Uses = tuple[Tensor, Tensor]  # each [layers, experts]: on answers, on whole conversations


@torch.inference_mode()
def expert_use(model: Any, task: str, count: int) -> Uses:
    """The share of one task's routes that each expert gets."""
    rng = Random(f"routing {task}")
    config = model.config
    on_answers = torch.zeros(config.num_hidden_layers, config.num_experts)
    on_all = torch.zeros_like(on_answers)
    for _ in range(count):
        example = draw(rng, task, held_out=True)
        ids, weights = encode(to_messages("", [(example.question, example.answer)]))
        # An answer's token is computed at the position before it.
        answering = torch.tensor([*weights[1:], 0.0]) == 1.0
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        for layer, scores in enumerate(logits):  # scores: [tokens, experts]
            chosen = scores.topk(config.num_experts_per_tok, -1).indices
            on_all[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
            chosen = chosen[answering].flatten()
            on_answers[layer] += torch.bincount(chosen, minlength=config.num_experts)
    return on_answers / on_answers.sum(1, keepdim=True), on_all / on_all.sum(1, keepdim=True)


def distance(one: Tensor, other: Tensor) -> float:
    """Total variation between two tasks' use of the experts, mean over layers (0 to 1)."""
    return float((one - other).abs().sum(1).mean() / 2)


def busiest_quarter(uses: list[Tensor]) -> list[float]:
    """For each layer, the share of routes that its busiest quarter of experts takes."""
    mean = torch.stack(uses).mean(0)
    return [float(layer.topk(len(layer) // 4).values.sum()) for layer in mean]


def describe(uses: dict[str, Tensor]) -> dict[str, Any]:
    """Distances between tasks, and how uneven the use is over all tasks and within each."""
    return {
        "distance": {
            f"{one} {other}": round(distance(uses[one], uses[other]), 3)
            for one, other in combinations(uses, 2)
        },
        "busiest_quarter": [round(share, 3) for share in busiest_quarter(list(uses.values()))],
        "busiest_quarter_of_a_task": {
            task: round(sum(busiest_quarter([use])) / len(use), 3) for task, use in uses.items()
        },
    }


def measure(model_path: Path, count: int) -> dict[str, Any]:
    """All routing figures of a checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    uses = {task: expert_use(model, task, count) for task in TASKS}
    return {
        "answers": describe({task: on_answers for task, (on_answers, _) in uses.items()}),
        "conversations": describe({task: on_all for task, (_, on_all) in uses.items()}),
    }


def main() -> None:
    """Measure and print, or write, the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40, help="conversations of each task")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    figures = json.dumps(measure(asked.model, asked.count), indent=1)
    if asked.out:
        asked.out.write_text(figures)
    else:
        print(figures)


if __name__ == "__main__":
    main()
