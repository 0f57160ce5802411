"""What transformers answers for a checkpoint: the oracle of every parity test.

Owns: greedy tokens and their log-probabilities in float32 on the CPU, and how near any of its
decisions was to a tie. Does not own: which checkpoints are asked about (`specs`).

The tokens come from one batched `generate`; a second, separate pass feeds each prompt and its
answer alone, without padding, and must choose the same tokens. So they are greedy text of a
batch of one as well, for the price of 16 passes more.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.oracle import vocabulary

NEW_TOKENS = 64
# Lengths around block borders (16), one token, and several blocks; see `prompts` for the sharing.
LENGTHS = (1, 2, 5, 9, 15, 16, 17, 24, 31, 32, 33, 48, 64, 97, 150, 200)
SHARED = {10: 8, 11: 16, 12: 32, 13: 33, 14: 64}  # prompt number -> tokens it has from the longest


@dataclass(frozen=True)
class Case:
    """One prompt, its greedy continuation and the log-probability of every token after the first.

    `logprobs[i]` belongs to token i + 1 of prompt + tokens, given all tokens before it.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Golden:
    """All cases of a checkpoint, and its smallest margins over all greedy steps."""

    cases: tuple[Case, ...]
    logit_margin: float  # between the best and the second logit, in units of `spread`
    router_margin: float  # between the last chosen and the first rejected expert, in router logits
    fewest_distinct: int  # distinct tokens in the most monotonous answer


def prompts(vocab: int, seed: int = 0) -> list[list[int]]:
    """The 16 prompts: random ordinary tokens; some begin as the longest one does."""
    draw = torch.Generator().manual_seed(seed)
    first = len(vocabulary.SPECIALS)
    made = [torch.randint(first, vocab, (n,), generator=draw).tolist() for n in LENGTHS]
    for number, shared in SHARED.items():
        made[number][:shared] = made[-1][:shared]
    return made


def load(checkpoint: Path) -> Any:
    """The checkpoint in transformers, in float32; every tensor must find its place."""
    transformers = _transformers()
    transformers.utils.logging.disable_progress_bar()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    problems = {key: value for key, value in report.items() if value}
    if problems:
        raise AssertionError(f"transformers does not take {checkpoint} as it is: {problems}")
    return model.eval()


def golden(checkpoint: Path, cache: Path | None = None) -> Golden:
    """The golden answers of `checkpoint`, from `cache` (a folder) when they are known."""
    if cache is None:
        return compute(checkpoint)
    kept = cache / f"{_fingerprint(checkpoint)}.json"
    if kept.exists():
        return _decode(json.loads(kept.read_text()))
    made = compute(checkpoint)
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(asdict(made)))
    return made


def compute(checkpoint: Path) -> Golden:
    """Ask transformers now."""
    model = load(checkpoint)
    asked = prompts(model.config.vocab_size)
    answers = generate(model, asked, NEW_TOKENS)
    cases: list[Case] = []
    margins: list[float] = []
    with _router_margins(model) as routed:
        for prompt, answer in zip(asked, answers, strict=True):
            logits = forward(model, prompt + answer)
            deciding = logits[len(prompt) - 1 : -1]
            if deciding.argmax(-1).tolist() != answer:
                raise NearTie(f"{checkpoint}: batched and single greedy text differ")
            margins.append(margin(deciding))
            following = torch.tensor(prompt + answer)[1:, None]
            logprobs = logits[:-1].log_softmax(-1).gather(1, following)[:, 0]
            cases.append(Case(tuple(prompt), tuple(answer), tuple(logprobs.tolist())))
    monotonous = min(len(set(answer)) for answer in answers)
    return Golden(tuple(cases), min(margins), min(routed, default=float("inf")), monotonous)


def margin(logits: torch.Tensor) -> float:
    """The smallest lead of a best logit in [rows, vocab], as a share of the logits' spread.

    A share, because the rounding of float32 grows with the logits, and near ties do not get
    rarer when they are scaled.
    """
    best = logits.topk(2).values
    return ((best[:, 0] - best[:, 1]).min() / logits.std()).item()


class NearTie(AssertionError):
    """Two ways to compute the same greedy text differ: the checkpoint is no oracle."""


def generate(
    model: Any, asked: list[list[int]], new_tokens: int, watch: Any = None
) -> list[list[int]]:
    """Greedy continuation of every prompt by transformers, in one left-padded batch, past EOS.

    `watch`, a logits processor, sees every step.
    """
    width = max(map(len, asked))
    rows = [[vocabulary.PAD] * (width - len(p)) + p for p in asked]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in asked]
    settings = _transformers().GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        bos_token_id=vocabulary.BOS,
        pad_token_id=vocabulary.PAD,
    )
    model.generation_config = settings  # else the checkpoint's own EOS would come back
    with torch.no_grad():
        out = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            generation_config=settings,
            logits_processor=[watch] if watch else None,
        )
    return [row.tolist() for row in out[:, width:]]


def forward(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence alone."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0].float()


@contextmanager
def _router_margins(model: Any) -> Iterator[list[float]]:
    """Record, for every forward pass inside, the smallest margin of each router."""
    seen: list[float] = []

    def record(module: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        logits = output[0].detach().float()
        best = logits.topk(min(module.top_k + 1, logits.shape[-1])).values
        if best.shape[-1] > module.top_k:
            seen.append((best[:, -2] - best[:, -1]).min().item())

    hooks = [
        module.register_forward_hook(record)
        for module in model.modules()
        if type(module).__name__.endswith("Router")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _transformers() -> Any:
    """The library, loaded late (it takes seconds) and untyped (its types promise too much)."""
    return importlib.import_module("transformers")


def _fingerprint(checkpoint: Path) -> str:
    """Changes with any file that can change an answer, and with the version of transformers."""
    version = _transformers().__version__
    digest = hashlib.sha256(f"{version} {NEW_TOKENS} {LENGTHS} {SHARED}".encode())
    for file in sorted(checkpoint.glob("*")):
        digest.update(file.name.encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _decode(value: dict[str, Any]) -> Golden:
    cases = tuple(
        Case(tuple(c["prompt"]), tuple(c["tokens"]), tuple(c["logprobs"])) for c in value["cases"]
    )
    return Golden(cases, **{k: v for k, v in value.items() if k != "cases"})
