"""Train the demo model for a given time and save it as a checkpoint.

    python -m tools.train_demo.train --seconds 460 --out build/demo

Made for one large GPU; a CPU can try it with few --rows. Data comes from worker processes that draw
conversations without end, so there are no epochs. A later run continues from an earlier one's
checkpoint with --resume. Scores here are teacher-forced: an answer counts if every token of it is
the likeliest one, which is when greedy decoding would give exactly this answer.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .chat import END_OF_TEXT, IM_END, Packed, encode_prompt, pack_rows
from .data import held_out_trials
from .export import load_tensors, save_checkpoint
from .model import DemoModel, Shape
from .tasks import TASKS

BALANCE_WEIGHT = 0.01  # enough to keep all experts alive, too little to make them alike
WARMUP_STEPS = 200


Network = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # the model, compiled or not


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run was asked to do."""

    seconds: float
    out: Path
    resume: Path | None
    length: int
    rows: int
    rate: float
    seed: int
    workers: int
    device: str


def parse_run() -> Run:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=460.0, help="training time, without compilation"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint to write")
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    parser.add_argument(
        "--length", type=int, default=512, help="tokens in a row of packed conversations"
    )
    parser.add_argument("--rows", type=int, default=96, help="rows in a batch")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12, help="processes that make data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return Run(**vars(parser.parse_args()))


def _feed(queue: Queue[Packed], seed: int, rows: int, length: int) -> None:
    rng = Random(seed)
    while True:
        queue.put(pack_rows(rng, rows, length))


@contextmanager
def batches(run: Run) -> Iterator[Iterator[Packed]]:
    """Endless batches from worker processes, which end with the block."""
    context = multiprocessing.get_context("fork")
    queue: Queue[Packed] = context.Queue(2 * run.workers)
    seeds = [1_000 * (run.seed + 1) + number for number in range(run.workers)]
    workers = [
        context.Process(target=_feed, args=(queue, seed, run.rows, run.length), daemon=True)
        for seed in seeds
    ]
    for worker in workers:
        worker.start()
    try:
        yield iter(queue.get, None)
    finally:
        for worker in workers:
            worker.terminate()


def rate_factor(step: int, progress: float) -> float:
    """Warm up, hold for the first half, then fall along a cosine to a fiftieth."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    if progress < 0.5:
        return warm
    return warm * max(0.02, 0.5 * (1 + math.cos(math.pi * (2 * progress - 1))))


def loss_of(network: Network, batch: Packed, device: torch.device) -> Tensor:
    """Weighted next-token loss plus the balance loss."""
    ids, owner, weights = (torch.from_numpy(part).to(device, non_blocking=True) for part in batch)
    ids = ids.long()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        logits, balance = network(ids, owner)
    losses = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    worth = weights[:, 1:].flatten()
    loss: Tensor = (losses * worth).sum() / worth.sum() + BALANCE_WEIGHT * balance
    return loss


def train(run: Run, model: DemoModel) -> int:
    """Train until the time is over; returns the number of steps."""
    device = torch.device(run.device)
    network: Network = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=run.rate,
        weight_decay=0.05,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    step, started = 0, time.monotonic()
    with batches(run) as source:
        for batch in source:
            progress = (time.monotonic() - started) / run.seconds
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = run.rate * rate_factor(step, progress)
            loss = loss_of(network, batch, device)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step == 3:
                started = time.monotonic()  # compilation is over
            if step % 1000 == 0:
                print(
                    f"{time.monotonic() - started:.0f} s, step {step}, loss {loss.item():.4f}",
                    flush=True,
                )
    return step


@torch.no_grad()
def forced_score(model: DemoModel, task: str, count: int) -> tuple[float, list[str]]:
    """The share of held-out trials whose right answer is the greedy one, and what failed."""
    device = next(model.parameters()).device
    trials = held_out_trials(task, count)
    failed: list[str] = []
    for start in range(0, count, 64):
        part = trials[start : start + 64]
        prompts = [encode_prompt(list(trial.messages)) for trial in part]
        answers = [[*trial.example.answer.encode(), IM_END] for trial in part]
        width = max(
            len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)
        )
        ids = torch.full((len(part), width), END_OF_TEXT, device=device)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        likeliest = model(ids, torch.zeros_like(ids))[0].argmax(-1).cpu()
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            reply = likeliest[row, len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist()
            if reply != answer:
                text = bytes(min(token, 255) for token in reply).decode(errors="replace")
                failed.append(f"{part[row].messages[-1]['content']} -> {text}")
    return 1 - len(failed) / count, failed


def report(model: DemoModel, count: int) -> None:
    """Print a line for each task."""
    for task in TASKS:
        score, failed = forced_score(model, task, count)
        print(f"{task:10s} {100 * score:6.2f} %  {failed[:3]}", flush=True)


def main() -> None:
    """Train, round to bf16, save, score."""
    run = parse_run()
    torch.manual_seed(run.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = DemoModel(Shape()).to(run.device)
    if run.resume:
        load_tensors(model, run.resume)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters", flush=True)
    started = time.monotonic()
    steps = train(run, model)
    print(f"{steps} steps, {time.monotonic() - started:.0f} s with compilation", flush=True)
    save_checkpoint(model, run.out)
    load_tensors(
        model, run.out
    )  # score the rounded weights, not the ones only this process ever had
    report(model, 400)


if __name__ == "__main__":
    main()
