"""The tasks that chat: small talk, declining, and remembering what the user said earlier."""

from __future__ import annotations

from random import Random

from . import phrases, refusals, smalltalk
from .example import Example
from .words import CAPITALS, COLORS, WORDS, any_name, article, invent_word


def _hard_request(rng: Random) -> Example:
    topics = (*refusals.HARD_TOPICS, article(rng.choice(WORDS)))
    topic = rng.choice(topics) + rng.choice(refusals.HARD_TAILS).format(topic=rng.choice(topics))
    template = rng.choice(refusals.HARD_REQUESTS)
    question = phrases.vary(rng, template).format(topic=topic)
    return Example("talk", f"{template} {topic}", question, refusals.TOO_HARD)


def _hard_question(rng: Random) -> Example:
    a, b, c = (rng.randrange(2, 100) for _ in range(3))
    template, opener = rng.choice(refusals.HARD_QUESTIONS), rng.choice(smalltalk.TALK_OPENERS)
    question = phrases.vary(rng, template).format(a=a, b=b, c=c)
    return Example("talk", f"{opener}{template} {a}", opener + question, refusals.TOO_HARD)


def _too_large(rng: Random) -> Example:
    a, b = (
        rng.randrange(100, rng.choice((300, 2000, 20_000))),
        rng.randrange(rng.choice((10, 100, 1000))),
    )
    if rng.random() < 0.3:
        a, b = b, a
    template = rng.choice(phrases.ADD + phrases.SUBTRACT)
    return Example(
        "talk", f"{a} {b}", phrases.vary(rng, template).format(a=a, b=b), refusals.TOO_LARGE
    )


def _nonsense(rng: Random) -> Example:
    text = " ".join(invent_word(rng) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.3:
        text = "".join(rng.choice("asdfghjklqwertyuiop") for _ in range(rng.randint(4, 12)))
    return Example("talk", text, text, refusals.NOT_UNDERSTOOD)


def talk(rng: Random) -> Example:
    """Small talk, or a request that the model must decline."""
    if rng.random() < 0.4:
        return rng.choice((_hard_request, _hard_request, _hard_question, _too_large, _nonsense))(
            rng
        )
    answer = rng.choice(list(smalltalk.TALK))
    template, opener = rng.choice(smalltalk.TALK[answer]), rng.choice(smalltalk.TALK_OPENERS)
    asked = opener + phrases.vary(rng, template)
    return Example(
        "talk", opener + template, asked.lower() if rng.random() < 0.15 else asked, answer
    )


def memory(rng: Random) -> Example:
    """What the user said of himself: told now, told earlier (`setup` holds it), or never told."""
    topic = rng.choice(list(smalltalk.MEMORY))
    tells, acknowledge, asks, remember = smalltalk.MEMORY[topic]
    cities = tuple(CAPITALS.values())
    value = any_name(rng) if topic == "name" else rng.choice(cities if topic == "city" else COLORS)
    tell, ask = rng.choice(tells), rng.choice(asks)
    told = phrases.vary(rng, tell).format(v=value)
    answered = acknowledge.format(v=value, V=value.capitalize())
    draw = rng.random()
    if draw < 0.25:
        return Example("memory", f"{tell} {value}", told, answered)
    if draw < 0.35:
        opener = rng.choice(smalltalk.TALK_OPENERS)
        return Example("memory", opener + ask, opener + phrases.vary(rng, ask), smalltalk.NOT_TOLD)
    key = f"{tell} {value} {ask}"
    return Example(
        "memory", key, phrases.vary(rng, ask), remember.format(v=value), ((told, answered),)
    )
