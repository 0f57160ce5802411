"""Score the demo model on held-out prompts, task by task, in transformers or through a server.

    python -m tools.train_demo.evaluate --model moestro/demo/model
    python -m tools.train_demo.evaluate --base-url http://127.0.0.1:8000/v1 --concurrency 16

Decoding is greedy. --out keeps every reply as JSON, and --compare counts the replies that differ
from such a file, so two runs, or two servers, can be held against each other.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, cast

from .data import Message, Trial, held_out_trials
from .tasks import TASKS

MAX_REPLY_TOKENS = 256

Conversations = Sequence[Sequence[Message]]
Backend = Callable[[Conversations], list[str]]  # one reply to each conversation, in order


class Answer(TypedDict):
    """One trial and what the model made of it."""

    task: str
    messages: list[Message]
    expected: str
    reply: str
    right: bool


def transformers_backend(model_path: Path, batch_size: int, dtype: str) -> Backend:
    """Greedy generation in transformers on the CPU, in left-padded batches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Any: transformers' types promise more shapes of result than these calls have.
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    greedy = {"do_sample": False, "temperature": None, "top_p": None}

    def reply_to(prompts: list[str]) -> list[str]:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=MAX_REPLY_TOKENS, **greedy)
        start = inputs["input_ids"].shape[1]
        return cast(list[str], tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True))

    def answer(conversations: Conversations) -> list[str]:
        prompts = [
            tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True)
            for turns in conversations
        ]
        # In the order given: a task's trials stand together, and their replies end at like lengths.
        starts = range(0, len(prompts), batch_size)
        batches = [reply_to(prompts[start : start + batch_size]) for start in starts]
        return [reply for batch in batches for reply in batch]

    return answer


def server_backend(base_url: str, model_name: str | None, concurrency: int) -> Backend:
    """Chat completions of an OpenAI-compatible server, several requests at a time."""
    name = model_name or _get(f"{base_url}/models")["data"][0]["id"]

    def reply_to(messages: Sequence[Message]) -> str:
        body = {
            "model": name,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": MAX_REPLY_TOKENS,
        }
        choice = _get(f"{base_url}/chat/completions", body)["choices"][0]
        return choice["message"]["content"] or ""

    def answer(conversations: Conversations) -> list[str]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(reply_to, conversations))

    return answer


def _get(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON at a URL; with a body it is posted."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return cast(dict[str, Any], json.load(response))


def evaluate(backend: Backend, trials: Sequence[Trial]) -> list[Answer]:
    """Ask all trials and mark the replies."""
    replies = backend([trial.messages for trial in trials])
    return [
        Answer(
            task=trial.example.task,
            messages=list(trial.messages),
            expected=trial.example.answer,
            reply=reply,
            right=trial.example.is_right(reply),
        )
        for trial, reply in zip(trials, replies, strict=True)
    ]


def scores(answers: Sequence[Answer]) -> dict[str, float]:
    """Percent right, by task."""
    marks: dict[str, list[bool]] = {}
    for answer in answers:
        marks.setdefault(answer["task"], []).append(answer["right"])
    return {task: 100 * sum(right) / len(right) for task, right in marks.items()}


def print_scores(answers: Sequence[Answer], shown_failures: int = 2) -> None:
    """A line for each task, and a few of its failures."""
    for task, score in scores(answers).items():
        print(f"{task:10s} {score:6.2f} %")
        failed = [answer for answer in answers if answer["task"] == task and not answer["right"]]
        for answer in failed[:shown_failures]:
            question = answer["messages"][-1]["content"]
            print(f"    {question!r}: {answer['reply']!r} instead of {answer['expected']!r}")


def count_differences(answers: Sequence[Answer], earlier: Sequence[Answer]) -> int:
    """How many of the same trials got another reply in an earlier run."""
    replies = {json.dumps(answer["messages"]): answer["reply"] for answer in earlier}
    return sum(
        replies.get(json.dumps(answer["messages"]), answer["reply"]) != answer["reply"]
        for answer in answers
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint folder; with --base-url, the served name")
    parser.add_argument("--base-url", help="an OpenAI-compatible server, up to and with /v1")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight at a time")
    parser.add_argument(
        "--batch-size", type=int, default=50, help="prompts in a transformers batch"
    )
    parser.add_argument("--dtype", default="float32", help="compute type in transformers")
    parser.add_argument("--count", type=int, default=200, help="trials of each task")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write scores and every answer here, as JSON")
    parser.add_argument(
        "--compare", type=Path, help="an earlier --out file to compare replies with"
    )
    arguments = parser.parse_args()
    if not (arguments.model or arguments.base_url):
        parser.error("give --model FOLDER or --base-url URL")
    return arguments


def main() -> None:
    """Score what the command line names."""
    asked = _parse()
    if asked.base_url:
        backend = server_backend(asked.base_url.rstrip("/"), asked.model, asked.concurrency)
    else:
        backend = transformers_backend(Path(asked.model), asked.batch_size, asked.dtype)
    trials = [
        trial for task in asked.tasks for trial in held_out_trials(task, asked.count, asked.seed)
    ]
    answers = evaluate(backend, trials)
    print_scores(answers)
    if asked.out:
        asked.out.write_text(json.dumps({"scores": scores(answers), "answers": answers}, indent=1))
    if asked.compare:
        earlier = json.loads(asked.compare.read_text())["answers"]
        print(f"{count_differences(answers, earlier)} of {len(answers)} replies differ")


if __name__ == "__main__":
    main()
