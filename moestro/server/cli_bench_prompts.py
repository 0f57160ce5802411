"""What `moestro bench serve` asks: random prompts, ones that start alike, or a data set.

Owns: the request bodies. Does not own: when they are sent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.errors import ConfigError

LOWEST = 8  # first token id that random prompts hold: special tokens mostly come first


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the route, and the body without the model's name."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Random prompts. Lengths in tokens; the first `shared` are the same in all prompts."""

    input_len: int
    shared: int = 0

    @property
    def tokens(self) -> int:
        """Of one prompt."""
        return self.shared + self.input_len


def random_asks(shape: Shape, count: int, output_len: int, vocab: int, seed: int) -> list[Ask]:
    """Completions of random token ids, each of exactly `output_len` tokens."""
    draw = random.Random(seed)
    low = min(LOWEST, vocab - 1)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(low, vocab) for _ in range(number)]

    shared = tokens(shape.shared)
    options = _options(output_len) | {"ignore_eos": True, "return_token_ids": True}
    return [
        Ask("/v1/completions", {"prompt": shared + tokens(shape.input_len), **options})
        for _ in range(count)
    ]


def recorded_asks(file: Path, count: int | None, output_len: int) -> list[Ask]:
    """The first `count` lines of a data set, or all. Raises ConfigError that names the line."""
    found = list(_lines(file, _options(output_len) | {"return_token_ids": True}))
    if not found:
        raise ConfigError(f"{file} has no prompts", param="dataset")
    if count is not None and count > len(found):
        raise ConfigError(
            f"--num-prompts is {count}, but {file} has {len(found)}", param="num_prompts"
        )
    return found[:count]


def _options(output_len: int) -> dict[str, Any]:
    return {
        "max_tokens": output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _lines(file: Path, options: dict[str, Any]) -> Iterator[Ask]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the data set {file}: {error}", param="dataset") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        given = [
            key for key in ("prompt", "messages") if isinstance(record, dict) and key in record
        ]
        if len(given) != 1:
            raise ConfigError(
                f"{file}, line {number}: should be a JSON object with prompt or messages",
                param="dataset",
            )
        path = "/v1/completions" if given[0] == "prompt" else "/v1/chat/completions"
        yield Ask(path, {given[0]: record[given[0]], **options})
