"""A real checkpoint that says whatever a test wants it to say.

Owns: turning chains of byte strings into weights and a tokenizer. Does not own: what is said.

The hidden state is the one-hot of the last token; attention and experts add zero (but are routed,
fetched and computed like any others); the head maps each token to its successor. The best logit
leads by sqrt(hidden), so sampling at temperature 1 follows the script too.

A prompt that ends in `Script.starts[k]` is answered by chain k. In a chat, the template puts the
last message at the very end, so that its content `<|start3|>` is answered by chain 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch

from tests.oracle import tiny, vocabulary

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    "{{- messages[-1]['content'] }}"
)


@dataclass(frozen=True)
class Chain:
    """What is said after one start token: each piece is one token.

    A piece may be said once in a checkpoint: the next token depends on the last one alone.
    """

    pieces: tuple[bytes, ...]
    then: Literal["eos", "loop"] = "eos"  # loop: from the first piece again, for ever

    @property
    def text(self) -> str:
        """One round of the chain as a client should see it."""
        return b"".join(self.pieces).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Script:
    """A written checkpoint: where it is, and how to start each chain."""

    folder: Path
    starts: tuple[int, ...]  # token id that starts chain k
    vocabulary: vocabulary.Vocabulary

    def prompt(self, chain: int, *, length: int = 1) -> list[int]:
        """A prompt of `length` tokens that chain number `chain` answers."""
        return [vocabulary.TURN] * (length - 1) + [self.starts[chain]]


def start(chain: int) -> str:
    """The text of the token that starts a chain: send it as the last message of a chat."""
    return f"<|start{chain}|>"


def make(folder: Path, chains: Sequence[Chain], *, context: int = 16384) -> Script:
    """Write a checkpoint that knows `chains`."""
    starts = [start(number) for number in range(len(chains))]
    words = vocabulary.build([piece for chain in chains for piece in chain.pieces], starts)
    width = -(-len(words) // 64) * 64
    spec = tiny.Spec(
        "qwen3_moe", 0, hidden=width, vocab=width, layers=2, head_width=16, context=context
    )
    tiny.make(folder, spec)
    vocabulary.write(folder, words, max_length=context, chat_template=CHAT_TEMPLATE)
    tiny.save(folder, dict(_weights(spec, _successors(words, chains))))
    return Script(folder, tuple(words.vocab[name] for name in starts), words)


def _successors(words: vocabulary.Vocabulary, chains: Sequence[Chain]) -> dict[int, int]:
    follows: dict[int, int] = {}
    for number, chain in enumerate(chains):
        said = [words.id(piece) for piece in chain.pieces]
        last = vocabulary.EOS if chain.then == "eos" else said[0]
        for one, next_one in pairwise([words.vocab[start(number)], *said, last]):
            if one in follows:
                raise ValueError(f"chain {number} repeats a token: no single successor")
            follows[one] = next_one
    return follows


def _weights(spec: tiny.Spec, follows: dict[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `spec` with everything silenced but embedding and head."""
    for name, tensor in tiny.tensors(spec):
        if name == "model.embed_tokens.weight":
            yield name, torch.eye(spec.vocab)
        elif name == "lm_head.weight":
            head = torch.eye(spec.vocab)  # a token outside every chain repeats itself
            for one, next_one in follows.items():
                head[:, one] = 0
                head[next_one, one] = 1
            yield name, head
        elif name.endswith("norm.weight"):
            yield name, torch.ones_like(tensor)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            yield name, torch.zeros_like(tensor)
        else:
            yield name, tensor
