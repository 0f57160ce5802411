"""Does a client notice when the engine process is killed?

Rounds of 16 streams of every kind run against the demo model: chats and completions, greedy and
seeded, with filters, penalties, log-probabilities, several choices and stop strings, short
prompts and long ones whose sweep takes a while. They start one after the other, and in each round
the engine gets SIGKILL at a random moment, in every third one again soon after, which is often
while the new engine loads. Each answer is compared with that of an undisturbed run: text, token
ids, log-probabilities, finish reason, usage. Reported is also the time from a kill until the
first stream, and until every stream, has got something from the new engine.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks import load, report
from tests.oracle.answers import Answers, Bodies, differences, run
from tests.oracle.serving import Served, is_idle, serve

PATIENCE = 120.0  # seconds for one round
SPREAD = 2.0  # seconds within which the streams of a round start
AGAIN = 4.0  # seconds within which a second kill follows the first
TICK = 0.005

BASE: dict[str, Any] = {"stream": True, "return_token_ids": True}
HOT = {"temperature": 0.9, "seed": 7}
FILTERS = {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "logit_bias": {"70": 3, "101": -2}}
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1}
USAGE = {"stream_options": {"include_usage": True}}
GREEDY = {"temperature": 0}


def bodies(tokens: int) -> dict[str, dict[str, Any]]:
    """The 16 requests, by what they are, most of `tokens` tokens. The stop string is missing."""
    full = {"max_tokens": tokens, "ignore_eos": True}
    chats: dict[str, dict[str, Any]] = {
        "greedy chat": GREEDY | full | USAGE,
        "seeded chat": HOT | full | {"logprobs": True, "top_logprobs": 3},
        "chat of two choices": HOT | full | {"n": 2} | USAGE,
        "chat with a stop string": GREEDY | full,
        "whole chat": HOT | full | {"stream": False, "n": 2, "logprobs": True},
    }
    completions: dict[str, dict[str, Any]] = {
        "greedy": GREEDY | full | {"logprobs": 2},
        "seeded": HOT | full | {"logprobs": 2} | USAGE,
        "filtered": HOT | full | FILTERS,
        "penalties": HOT | full | PENALTIES | {"logprobs": 1},
        "greedy with penalties": GREEDY | full | PENALTIES,
        "two choices": HOT | full | {"n": 2, "logprobs": 2},
        "a stop token": HOT
        | full
        | {"min_tokens": tokens // 3, "stop_token_ids": list(range(97, 105))},
        "echo": HOT | full | {"echo": True, "logprobs": 2},
        "long prompt": GREEDY | full | {"prompt": prompt(12 * tokens, 1), "logprobs": 1},
        "longest prompt": HOT | {"max_tokens": 40} | {"prompt": prompt(25 * tokens, 2)},
        "short": HOT | {"max_tokens": 5, "logprobs": 2},
    }
    made = {
        name: {"messages": [{"role": "user", "content": f"What is {name}?"}]} | BASE | body
        for name, body in chats.items()
    }
    for number, (name, body) in enumerate(completions.items()):
        made[name] = {"prompt": prompt(5 + 3 * number, number)} | BASE | body
    return made


def prompt(length: int, seed: int) -> list[int]:
    """Ordinary tokens."""
    return load.random_prompts(256, 1, length, seed)[0]


def with_stop(asked: Bodies, answers: Answers) -> dict[str, dict[str, Any]]:
    """The same requests with a stop string that comes late in the answer without it."""
    name = "chat with a stop string"
    text = answers[name].choices[0].text
    stop = next(
        text[at : at + size]
        for size in range(3, len(text))
        for at in (2 * len(text) // 3,)
        if text.find(text[at : at + size]) > len(text) // 3
    )
    return dict(asked) | {name: asked[name] | {"stop": [stop]}}


@dataclass
class Found:
    """What all the rounds showed."""

    kills: int = 0
    while_loading: int = 0
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds from a kill to the first new token
    every: list[float] = field(default_factory=list)  # and to a new token of every stream


class Killer:
    """Kills the engine of one server and watches the streams come back."""

    def __init__(self, served: Served, found: Found, dice: random.Random, most: int) -> None:
        self._served = served
        self._found = found
        self._dice = dice
        self._most = most

    async def round(self, answers: Answers, duration: float) -> None:
        """Kill once within `duration` seconds; sometimes again."""
        await asyncio.sleep(self._dice.uniform(0, duration))
        killed = await self._kill()
        if self._found.kills < self._most and self._dice.random() < 1 / 3:
            await asyncio.sleep(self._dice.uniform(0, AGAIN))
            if (await self._health())["status"] == "restarting":
                self._found.while_loading += 1
            killed = await self._kill()
        await self._resumed(answers, killed)

    async def _kill(self) -> float:
        """Kill the engine and wait for the next one; returns when the first was killed."""
        dead = await self._engine(None)
        dead.kill()
        killed = time.monotonic()
        self._found.kills += 1
        await self._engine(dead)
        return killed

    async def _engine(self, after: psutil.Process | None) -> psutil.Process:
        while True:
            children = psutil.Process(self._served.process.pid).children()
            found = [c for c in children if c != after and c.status() != psutil.STATUS_ZOMBIE]
            if found:
                return found[0]
            await asyncio.sleep(TICK)

    async def _health(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._served.health)

    async def _resumed(self, answers: Answers, killed: float) -> None:
        """Wait until what was open at the kill has got something more; notes how long it took."""
        before = {
            name: answer.pieces
            for name, answer in answers.items()
            if answer.pieces and not answer.done
        }
        if not before:
            return
        waiting = set(before)
        while waiting:
            back = {n for n in waiting if answers[n].pieces > before[n] or answers[n].done}
            now = time.monotonic() - killed
            if back and len(waiting) == len(before):
                self._found.first.append(now)
            waiting -= back
            if not waiting:
                self._found.every.append(now)
            await asyncio.sleep(TICK)


async def measure(served: Served, kills: int, seed: int, tokens: int = 120) -> Found:
    """Run rounds until the engine was killed so many times."""
    dice = random.Random(seed)
    found = Found()
    asked = bodies(tokens)
    asked = with_stop(asked, await run(served.port, asked, patience=PATIENCE))
    started = time.monotonic()
    wanted = await run(served.port, asked, starts=_starts(asked, dice), patience=PATIENCE)
    duration = time.monotonic() - started
    if failed := [f"{name}: {answer.failure}" for name, answer in wanted.items() if answer.failure]:
        raise RuntimeError(f"the undisturbed run failed: {failed}")
    killer = Killer(served, found, dice, kills)
    while found.kills < kills:

        async def disturb(answers: Answers) -> None:
            await killer.round(answers, duration)

        starts = _starts(asked, dice)
        answers = await run(served.port, asked, disturb, starts=starts, patience=PATIENCE)
        found.compared += len(answers)
        found.wrong += _wrong(answers, wanted, found.kills)
    await asyncio.to_thread(served.wait, is_idle, "idle")
    return found


def _starts(asked: Bodies, dice: random.Random) -> dict[str, float]:
    return {name: dice.uniform(0, SPREAD) for name in asked}


def _wrong(answers: Answers, wanted: Answers, kill: int) -> Iterator[str]:
    for name, difference in differences(answers, wanted).items():
        yield f"kill {kill}, {name}: {difference}"


def main() -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="", help="default: the included demo model")
    arguments = parser.parse_args()
    with report.workplace(arguments) as work:
        flags = ("--engine-restarts", str(2 * arguments.kills))
        with serve(arguments.model, *flags, log=work / "server.log") as served:
            found = asyncio.run(measure(served, arguments.kills, arguments.seed))
    for line in found.wrong:
        print(line)
    return report.finish(arguments, _rows(found), _bars(found), vars(found))


def _rows(found: Found) -> list[tuple[str, object]]:
    return [
        ("kills", f"{found.kills}, {found.while_loading} of them while the engine was loading"),
        ("streams compared", found.compared),
        ("to the first new token, s", _shown(found.first)),
        ("until every stream goes on, s", _shown(found.every)),
    ]


def _shown(values: list[float]) -> str:
    if not values:
        return "no stream was open"
    p50, p90 = (report.percentile(values, share) for share in (0.5, 0.9))
    return f"p50 {p50:.2f}, p90 {p90:.2f}, max {max(values):.2f}"


def _bars(found: Found) -> list[report.Bar]:
    return [report.Bar("streams lost, repeated or different", len(found.wrong), 0)]


if __name__ == "__main__":
    sys.exit(main())
