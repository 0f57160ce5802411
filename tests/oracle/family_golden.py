"""What transformers answers for a checkpoint of `families`: tokens, log-probabilities and routing.

Owns: the answers, and the proof that none of them hangs by a thread: with its embeddings moved by a
hundred times what rounding moves them, transformers chooses the same tokens and experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.oracle import families, golden, vocabulary

NEW_TOKENS = 64
LENGTHS = (1, 17, 33, 48, 90)
SHARED = {3: 32}  # prompt number -> tokens it has from the longest
NOISE = 1e-5
LOGIT_MARGIN = 0.0007  # of the logits' spread, as in `specs`
MOST_SHIFT = 0.01  # of a logit, by the noise
FEWEST_DISTINCT = 10

Routes = list[torch.Tensor]  # for each MoE layer, sorted expert ids [tokens, k]


@dataclass(frozen=True)
class Case:
    """One prompt with its greedy continuation. `logprobs[i]` belongs to token i + 1 of both."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    routes: Routes


def prompts(vocab: int) -> list[list[int]]:
    """Random ordinary tokens; one begins as the longest does."""
    draw = torch.Generator().manual_seed(1)
    first = len(vocabulary.SPECIALS)
    made = [torch.randint(first, vocab, (n,), generator=draw).tolist() for n in LENGTHS]
    for number, shared in SHARED.items():
        made[number][:shared] = made[-1][:shared]
    return made


def compute(folder: Path, spec: families.Tiny) -> list[Case]:
    """Ask transformers. AssertionError when the checkpoint is no good oracle."""
    model = families.load(folder, spec)
    asked = prompts(model.config.vocab_size)
    answers = golden.generate(model, asked, NEW_TOKENS)
    return [_case(model, prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]


def _case(model: Any, prompt: list[int], answer: list[int]) -> Case:
    whole = prompt + answer
    with routes(model) as chosen:
        logits = golden.forward(model, whole)
    deciding = logits[len(prompt) - 1 : -1]
    assert deciding.argmax(-1).tolist() == answer, "batched and single greedy text differ"
    assert golden.margin(deciding) >= LOGIT_MARGIN, "two tokens are too near"
    assert len(set(answer)) >= FEWEST_DISTINCT, "the answer is monotonous"
    with routes(model) as moved, noise(model):
        other = golden.forward(model, whole)
    assert other[len(prompt) - 1 : -1].argmax(-1).tolist() == answer, "a token is near a tie"
    assert all(map(torch.equal, chosen, moved)), "an expert is near a tie"
    assert (other - logits).abs().max() < MOST_SHIFT, "something discontinuous is near"
    following = torch.tensor(whole)[1:, None]
    logprobs = logits[:-1].log_softmax(-1).gather(1, following)[:, 0]
    return Case(tuple(prompt), tuple(answer), tuple(logprobs.tolist()), chosen)


@contextmanager
def routes(model: Any) -> Iterator[Routes]:
    """Record which experts each MoE layer chooses in the forward pass inside."""
    seen: Routes = []

    def record(module: Any, _: Any, output: Any) -> None:
        if isinstance(output, tuple):
            ids = next(part for part in output if not part.is_floating_point())
        else:  # DBRX's router gives logits, and the block around it chooses
            ids = output.topk(model.config.ffn_config.moe_top_k).indices
        seen.append(ids.sort(-1).values)

    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    assert routers, "transformers has renamed its routers"
    hooks = [module.register_forward_hook(record) for module in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def noise(model: Any) -> Iterator[None]:
    """Embeddings that are a little off, inside."""
    draw = torch.Generator().manual_seed(2)

    def move(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + NOISE * torch.randn(output.shape, generator=draw))

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()
