"""Many requests at once, all that came of each, and what differs between two runs of them.

Owns: collecting text, token ids, log-probabilities and usage of both generating routes, streamed
or not, and comparing them. Does not own: what is asked, or what happens to the server meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.oracle import wire

TOLERANCE = 1e-3  # of a log-probability: a sweep and a decode step add in different orders


@dataclass
class Choice:
    """What came of one choice."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    spelled: list[str] = field(default_factory=list)  # tokens as the log-probabilities spell them
    logprobs: list[float | None] = field(default_factory=list)
    top: list[list[str]] = field(default_factory=list)
    finish: str | None = None

    def take(self, part: dict[str, Any]) -> None:
        """Add one chunk's choice, or a whole one."""
        if self.finish is not None:
            raise AssertionError(f"a choice goes on after its end: {part}")
        message = part.get("delta") or part.get("message") or {}
        self.text += part.get("text") or message.get("content") or ""
        self.ids += part.get("token_ids") or []
        self.finish = part["finish_reason"]
        scored = part.get("logprobs") or {}
        for entry in scored.get("content") or []:
            self.spelled.append(entry["token"])
            self.logprobs.append(entry["logprob"])
            self.top.append(sorted(top["token"] for top in entry["top_logprobs"]))
        self.spelled += scored.get("tokens") or []
        self.logprobs += scored.get("token_logprobs") or []
        self.top += [sorted(top or {}) for top in scored.get("top_logprobs") or []]


@dataclass
class Answer:
    """What came of one request."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Any = None
    done: bool = False
    failure: str | None = None
    pieces: int = 0
    last: float = 0.0  # when something came, on the monotonic clock

    @property
    def length(self) -> int:
        """Characters so far."""
        return sum(len(choice.text) for choice in self.choices.values())

    def take(self, event: dict[str, Any]) -> None:
        """Add one event of a stream, or a whole reply."""
        if "error" in event:
            raise AssertionError(f"an error came: {event['error']}")
        self.last = time.monotonic()
        self.pieces += 1
        self.usage = event.get("usage") or self.usage
        for part in event["choices"]:
            self.choices.setdefault(part["index"], Choice()).take(part)


Answers = dict[str, Answer]
Bodies = Mapping[str, dict[str, Any]]
Disturb = Callable[[Answers], Awaitable[None]]


async def run(
    port: int,
    bodies: Bodies,
    disturb: Disturb | None = None,
    *,
    starts: Mapping[str, float] | None = None,
    patience: float = 60.0,
) -> Answers:
    """Run all requests beside each other, while `disturb` sees the answers grow.

    What has `messages` is a chat. `starts`: seconds until a request is sent. What goes wrong with
    a request is its `failure`. TimeoutError after `patience` seconds.
    """
    answers = {name: Answer() for name in bodies}
    async with asyncio.timeout(patience), asyncio.TaskGroup() as group:
        for name, body in bodies.items():
            start = (starts or {}).get(name, 0.0)
            group.create_task(_one(port, body, answers[name], start))
        if disturb is not None:
            await disturb(answers)
    return answers


async def _one(port: int, body: dict[str, Any], answer: Answer, start: float) -> None:
    await asyncio.sleep(start)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = await wire.ask(port, path, body)
    try:
        if reply.status != 200:
            raise AssertionError(f"{reply.status}: {(await reply.body()).decode()}")
        if body.get("stream"):
            async for event in reply.events():
                answer.take(event)
        else:
            answer.take(await reply.json())
    except (AssertionError, OSError, EOFError, ValueError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    finally:
        answer.done = True
        await reply.leave()


def differences(found: Answers, wanted: Answers) -> dict[str, str]:
    """What is not as wanted, by request: the first difference of each."""
    pairs = ((name, next(_differences(answer, wanted[name]), "")) for name, answer in found.items())
    return {name: difference for name, difference in pairs if difference}


def _differences(found: Answer, wanted: Answer) -> Iterator[str]:
    if found.failure is not None:
        yield found.failure
    if found.choices.keys() != wanted.choices.keys():
        yield f"choices {sorted(found.choices)} instead of {sorted(wanted.choices)}"
        return
    for index, choice in found.choices.items():
        other = wanted.choices[index]
        for name in ("ids", "text", "spelled", "top", "finish"):
            if getattr(choice, name) != getattr(other, name):
                yield f"choice {index}, {name}: {_parting(choice, other, name)}"
        if not _alike(choice.logprobs, other.logprobs):
            yield f"choice {index}: other log-probabilities"
    if _counts(found.usage) != _counts(wanted.usage):
        yield f"usage {found.usage} instead of {wanted.usage}"


def _parting(found: Choice, wanted: Choice, name: str) -> str:
    """Where two values part, and whether one is a part of the other."""
    one, other = getattr(found, name), getattr(wanted, name)
    if name == "finish":
        return f"{one!r} instead of {other!r}"
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return f"lost or repeated: {len(one)} instead of {len(other)}"
    return (
        f"differs at {at} of {len(other)}: {one[at : at + 4]!r} instead of {other[at : at + 4]!r}"
    )


def _counts(usage: dict[str, Any] | None) -> dict[str, Any]:
    """What does not depend on what the engine has seen before."""
    return {k: v for k, v in (usage or {}).items() if k != "prompt_tokens_details"}


def _alike(found: list[float | None], wanted: list[float | None]) -> bool:
    return len(found) == len(wanted) and all(
        a == b if a is None or b is None else math.isclose(a, b, abs_tol=TOLERANCE, rel_tol=0)
        for a, b in zip(found, wanted, strict=True)
    )
