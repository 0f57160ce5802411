"""What a demo task produces: one checkable question. No generators."""

from __future__ import annotations

import json
from dataclasses import dataclass

Turn = tuple[str, str]  # what the user says, what the model answers


@dataclass(frozen=True, slots=True)
class Example:
    """One question with its only right answer.

    `key` names what must be unseen at test time. Where instances abound (number pairs, words,
    texts) it is the instance alone, so a held-out one was never trained in any wording; where they
    are few (capitals, units) it is instance and wording together. `setup` holds turns that must
    stand earlier in the same conversation.
    """

    task: str
    key: str
    question: str
    answer: str
    setup: tuple[Turn, ...] = ()

    def is_right(self, reply: str) -> bool:
        """Exact text counts; JSON may be spaced or ordered differently."""
        if self.task != "json":
            return reply.strip() == self.answer
        try:
            return bool(json.loads(reply) == json.loads(self.answer))
        except json.JSONDecodeError:
            return False
