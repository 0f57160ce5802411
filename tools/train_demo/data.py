"""Demo data: the held-out split, and conversations built from the tasks. No tensors and no tokens.

The split hashes each example's key, so it needs no stored list and cannot drift: the same key is on
the same side in every run, process and Python version. Training draws only from one side, the final
turn of a test from the other.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

from .example import Example, Turn
from .smalltalk import SYSTEM_ROLES, SYSTEM_RULES
from .tasks import TASKS

Message = dict[str, str]  # role and content, as chat APIs and chat templates take it

HELD_OUT_PARTS = 12  # one key of twelve is never trained


@dataclass(frozen=True, slots=True)
class Trial:
    """One test: what the model is shown, and the example whose answer it must give."""

    messages: tuple[Message, ...]
    example: Example


def is_held_out(example: Example) -> bool:
    """Whether this example is kept from training."""
    return zlib.crc32(f"{example.task}|{example.key}".encode()) % HELD_OUT_PARTS == 0


def draw(rng: Random, task: str, held_out: bool) -> Example:
    """An example of the task from the wanted side of the split."""
    generate, _ = TASKS[task]
    while True:
        example = generate(rng)
        if is_held_out(example) == held_out:
            return example


def draw_any(rng: Random, *, with_memory: bool) -> Example:
    """A training example of a random task."""
    names = list(TASKS) if with_memory else [name for name in TASKS if name != "memory"]
    return draw(rng, rng.choices(names, [TASKS[name][1] for name in names])[0], held_out=False)


def system_prompt(rng: Random) -> str:
    """A short system message; empty for none, which is more than half of the time."""
    if rng.random() < 0.55:
        return ""
    return f"{rng.choice(SYSTEM_ROLES)} {rng.choice(SYSTEM_RULES)}".strip()


def turns_of(rng: Random, example: Example) -> list[Turn]:
    """The example's turns; what it must remember may lie a few turns back."""
    turns = list(example.setup)
    if turns:
        fillers = [draw_any(rng, with_memory=False) for _ in range(rng.choice((0, 0, 1, 2)))]
        turns += [(filler.question, filler.answer) for filler in fillers]
    return [*turns, (example.question, example.answer)]


def training_conversation(rng: Random) -> list[Message]:
    """One to many turns, most often one, too many for a short row; every answer in it is right."""
    length = rng.choices((1, 2, 3, 4, rng.randint(5, 30)), (45, 20, 12, 10, 13))[0]
    turns: list[Turn] = []
    with_memory = True
    for _ in range(length):
        example = draw_any(rng, with_memory=with_memory)
        # Only one memory example in a conversation: a second could contradict the first.
        with_memory = with_memory and example.task != "memory"
        turns += turns_of(rng, example)
    return to_messages(system_prompt(rng), turns)


def held_out_trial(rng: Random, task: str) -> Trial:
    """A test of one task: half of them alone, half after one to three other turns."""
    example = draw(rng, task, held_out=True)
    history = [draw_any(rng, with_memory=False) for _ in range(rng.choice((0, 0, 0, 1, 2, 3)))]
    turns = [(past.question, past.answer) for past in history] + turns_of(rng, example)
    messages = to_messages(system_prompt(rng), turns)
    return Trial(tuple(messages[:-1]), example)


def held_out_trials(task: str, count: int, seed: int = 7) -> list[Trial]:
    """The same trials for the same arguments, whatever other tasks are asked for."""
    rng = Random(f"{seed} {task}")
    return [held_out_trial(rng, task) for _ in range(count)]


def to_messages(system: str, turns: list[Turn]) -> list[Message]:
    """Turns as chat messages."""
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages
