"""How much --expert-dtype costs: perplexity with plain experts and with quantised ones.

Two samples: answers of held-out questions of the demo model, given the questions, and running text.
Each is scored token by token in one process, in float32 on the CPU. Beside the perplexity stands
how far log p of a token moves on average: perplexity may also fall when everything is blurred.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from transformers import AutoTokenizer

from benchmarks import report
from moestro.kernels.formats import LOSSY
from moestro.types import Request, SamplingParams
from tests.oracle import drive
from tools.train_demo.data import held_out_trials
from tools.train_demo.tasks import TASKS

DEMO = Path(__file__).parents[1] / "moestro" / "demo" / "model"
PIECE = 512  # tokens of running text that are scored together
Sample = list[tuple[list[int], int]]  # tokens, and how many of the first are given


def answers(tokenizer: Any, count: int, seed: int) -> Sample:
    """Questions with their right answers, of which the answers count."""
    found = []
    for task in TASKS:
        for trial in held_out_trials(task, count, seed):
            asked = [dict(message) for message in trial.messages]
            given = _render(tokenizer, asked, add_generation_prompt=True)
            answer = {"role": "assistant", "content": trial.example.answer}
            found.append((_render(tokenizer, [*asked, answer]), len(given)))
    return found


def _render(tokenizer: Any, messages: list[dict[str, str]], **more: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **more)
    return tokenizer.encode(text, add_special_tokens=False)


def running(tokenizer: Any, text: str, pieces: int) -> Sample:
    """The beginning of a text, in pieces that do not see each other."""
    tokens = tokenizer.encode(text, add_special_tokens=False)[: pieces * PIECE]
    return [(tokens[at : at + PIECE], 1) for at in range(0, len(tokens), PIECE)]


def perplexity(scores: list[float]) -> float:
    """exp(-mean log p)."""
    return math.exp(-sum(scores) / len(scores))


def score(model: Path, sample: Sample, expert_dtype: str) -> tuple[list[float], int]:
    """Log p of every token of a sample that is not given, and the bytes of one expert."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    kept: list[float] = []
    with drive.engine(model, expert_dtype=expert_dtype) as engine:
        size = engine.stats().experts.expert_bytes
        asked = [Request(str(n), tuple(tokens), sampling) for n, (tokens, _) in enumerate(sample)]
        outputs = drive.generate(engine, asked)
        for number, (_, given) in enumerate(sample):
            scores = outputs[str(number)].prompt_logprobs
            assert scores is not None
            kept += [one.logprob for one in scores[given:] if one is not None]
    return kept, size


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint (default: the demo)")
    parser.add_argument("--text", type=Path, help="file of running text (default: Python's help)")
    parser.add_argument("--count", type=int, default=8, help="questions of each task")
    parser.add_argument("--pieces", type=int, default=8, help=f"times {PIECE} tokens of text")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = arguments.text.read_text() if arguments.text else "\n".join(topics.values())
    samples = {"running text": running(tokenizer, text, arguments.pieces)}
    if arguments.model == DEMO:
        samples["answers"] = answers(tokenizer, arguments.count, arguments.seed)
    rows, details = [], {}
    for name, sample in samples.items():
        plain, whole = score(arguments.model, sample, "auto")
        rows.append((f"{name}: perplexity of {len(plain)} tokens", f"{perplexity(plain):.4f}"))
        for dtype in LOSSY:
            found, size = score(arguments.model, sample, dtype)
            change = 100 * (perplexity(found) / perplexity(plain) - 1)
            moved = sum(abs(a - b) for a, b in zip(found, plain, strict=True)) / len(plain)
            details[f"{name} {dtype}"] = {"percent": change, "moved": moved}
            text = f"{perplexity(found):.4f} ({change:+.2f} %); log p moves by {moved:.4f}"
            rows.append((f"  {dtype}, experts {whole / size:.1f} times smaller", text))
    return report.finish(arguments, rows, [], details)


if __name__ == "__main__":
    sys.exit(main())
