"""The demo model's tokens: bytes, three special ones, the chat template; packing into rows.

`encode` is the fast path for training. export.py writes the same vocabulary as a tokenizer.json,
and a test holds the two together.
"""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray

from .data import Message, training_conversation

# Ids 0-255 are the bytes: digits and letters are single tokens, and any text has an encoding.
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
SPECIAL_TOKENS = {END_OF_TEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
VOCAB_SIZE = 320  # rounded up: the rows above the specials are never a target

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Reading the question is worth a little: it teaches words. Its numbers are noise, so no more.
QUESTION_WEIGHT = 0.05


def encode(messages: list[Message]) -> tuple[list[int], list[float]]:
    """Token ids of a whole conversation, and the weight of each as a training target."""
    ids: list[int] = []
    weights: list[float] = []
    for message in messages:
        head = [IM_START, *f"{message['role']}\n".encode()]
        body = [*message["content"].encode(), IM_END]
        ids += [*head, *body, ord("\n")]
        worth = 1.0 if message["role"] == "assistant" else QUESTION_WEIGHT
        weights += [QUESTION_WEIGHT] * len(head) + [worth] * len(body) + [QUESTION_WEIGHT]
    return ids, weights


def encode_prompt(messages: list[Message]) -> list[int]:
    """Token ids up to where the assistant's next answer begins."""
    return [*encode(messages)[0], IM_START, *b"assistant\n"]


Packed = tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.float32]]


def pack_rows(rng: Random, rows: int, length: int) -> Packed:
    """Random training conversations side by side.

    Returns token ids, the number of the conversation each token belongs to (0 is padding; attention
    stays within a number) and target weights, all [rows, length].
    """
    ids = np.full((rows, length), END_OF_TEXT, np.int16)
    owner = np.zeros((rows, length), np.int16)
    weights = np.zeros((rows, length), np.float32)
    for row in range(rows):
        used, number, misses = 0, 0, 0
        while misses < 3:  # a long conversation may not fit where a short one still does
            tokens, worth = encode(training_conversation(rng))
            end = used + len(tokens)
            if end > length:
                misses += 1
                continue
            number += 1
            ids[row, used:end], weights[row, used:end], owner[row, used:end] = tokens, worth, number
            weights[row, used] = 0.0  # nothing before it predicts the first token
            used = end
    return ids, owner, weights
