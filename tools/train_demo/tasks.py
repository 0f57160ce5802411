"""The demo tasks: each function draws one question with its only right answer. No split, no chat format, no tensors.

An example's `key` names what must be unseen at test time. Where instances abound (number pairs, words, texts) the key
is the instance alone, so a held-out one was never trained in any wording; where they are few (capitals, units) it is
instance and wording together. `TASKS` maps each task's name to its function and its share of the training data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from string import Formatter, ascii_lowercase

from . import phrases
from .words import CAPITALS, COLORS, JOBS, KINDS, WEEKDAYS, WORDS, any_name, any_word, article, invent_word

Turn = tuple[str, str]  # what the user says, what the model answers


@dataclass(frozen=True, slots=True)
class Example:
    """One checkable question; `setup` holds turns that must stand earlier in the same conversation."""

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


def add(rng: Random) -> Example:
    a, b = rng.randrange(100), rng.randrange(100)
    question = phrases.vary(rng, rng.choice(phrases.ADD)).format(a=a, b=b)
    return Example("add", f"{a}+{b}", question, str(a + b))


def subtract(rng: Random) -> Example:
    a, b = rng.randrange(100), rng.randrange(100)
    template = rng.choice(phrases.SUBTRACT)
    # "difference", "away" and "left" ask for no negative number; elsewhere a few keep the minus sign in practice.
    if a < b and (rng.random() < 0.7 or any(word in template for word in ("difference", "away", "left"))):
        a, b = b, a
    return Example("subtract", f"{a}-{b}", phrases.vary(rng, template).format(a=a, b=b), str(a - b))


def backwards(rng: Random) -> Example:
    word = any_word(rng)
    question = phrases.vary(rng, rng.choice(phrases.BACKWARDS)).format(word=word)
    return Example("backwards", word, question, word[::-1])


def sort(rng: Random) -> Example:
    words: set[str] = set()
    size = rng.choice((2, 3, 3, 3, 4, 4, 5))
    while len(words) < size:
        words.add(rng.choice(WORDS) if rng.random() < 0.8 else any_word(rng))
    shuffled = sorted(words)
    rng.shuffle(shuffled)
    listed = rng.choice((", ", ", ", " ")).join(shuffled)
    if rng.random() < 0.2:
        listed = f"{', '.join(shuffled[:-1])} and {shuffled[-1]}"
    question = phrases.vary(rng, rng.choice(phrases.SORT)).format(words=listed)
    return Example("sort", " ".join(sorted(words)), question, ", ".join(sorted(words)))


def count(rng: Random) -> Example:
    word = any_word(rng)
    if rng.random() < 0.12:
        question = phrases.vary(rng, rng.choice(phrases.LENGTH)).format(word=word)
        return Example("count", f"length {word}", question, str(len(word)))
    draw = rng.random()
    if draw < 0.3:
        letter = max(word, key=word.count)  # repeated letters are the hard case and rare by chance
    else:
        letter = rng.choice(word if draw < 0.75 else ascii_lowercase)
    question = phrases.vary(rng, rng.choice(phrases.COUNT)).format(letter=letter, word=word)
    return Example("count", f"{letter} {word}", question, str(word.count(letter)))


UNITS: tuple[tuple[str, str, str, int], ...] = (
    ("kilometer", "kilometers", "meters", 1000),
    ("meter", "meters", "centimeters", 100),
    ("centimeter", "centimeters", "millimeters", 10),
    ("kilogram", "kilograms", "grams", 1000),
    ("liter", "liters", "milliliters", 1000),
    ("hour", "hours", "minutes", 60),
    ("minute", "minutes", "seconds", 60),
    ("day", "days", "hours", 24),
    ("week", "weeks", "days", 7),
    ("year", "years", "months", 12),
    ("foot", "feet", "inches", 12),
    ("dollar", "dollars", "cents", 100),
    ("century", "centuries", "years", 100),
    ("decade", "decades", "years", 10),
)


def units(rng: Random) -> Example:
    number = rng.randrange(1, 100) if rng.random() < 0.95 else 1
    one, many, small, factor = rng.choice(UNITS)
    amount = f"{number} {one if number == 1 else many}"
    if number == 1 and rng.random() < 0.5:
        amount = f"an {one}" if one == "hour" else article(one)
    template = rng.choice(phrases.UNITS)
    question = phrases.vary(rng, template).format(small=small, amount=amount)
    return Example("units", f"{template} {amount}", question, f"{number * factor} {small}")


def capitals(rng: Random) -> Example:
    # Now and then a country that does not exist: saying so is better than naming some city.
    country = rng.choice(list(CAPITALS)) if rng.random() < 0.92 else invent_word(rng).capitalize()
    template = rng.choice(phrases.CAPITALS)
    question = phrases.vary(rng, template).format(country=country)
    return Example("capitals", f"{template} {country}", question, CAPITALS.get(country, phrases.NOT_KNOWN))


def _yes_no(key: str, question: str, truth: bool) -> Example:
    return Example("facts", key, question, "Yes." if truth else "No.")


def _capital_fact(rng: Random) -> Example:
    country, other = rng.sample(list(CAPITALS), 2)
    truth = rng.random() < 0.5
    city = CAPITALS[country if truth else other]
    template = rng.choice(phrases.CAPITAL_FACTS)
    question = phrases.vary(rng, template).format(city=city, country=country)
    return _yes_no(f"{template} {city} {country}", question, truth)


def _kind_fact(rng: Random) -> Example:
    kind, other = rng.sample(list(KINDS), 2)
    truth = rng.random() < 0.5
    thing = rng.choice(KINDS[kind if truth else other])
    named = thing if thing in KINDS["color"] else article(thing)
    template = rng.choice(phrases.KIND_FACTS)
    question = phrases.vary(rng, template).format(thing=named, kind=article(kind))
    return _yes_no(f"{template} {thing} {kind}", question, truth)


def _order_fact(rng: Random) -> Example:
    a, b = rng.sample(range(100), 2)
    more = rng.random() < 0.6
    template = rng.choice(phrases.MORE_FACTS if more else phrases.LESS_FACTS)
    question = phrases.vary(rng, template).format(a=a, b=b)
    return _yes_no(f"{a} {b}", question, a > b if more else a < b)


def _parity_fact(rng: Random) -> Example:
    a, parity = rng.randrange(100), rng.choice(("even", "odd"))
    template = rng.choice(phrases.PARITY_FACTS)
    question = phrases.vary(rng, template).format(a=a, parity=parity)
    return _yes_no(f"{template} {a} {parity}", question, (a % 2 == 0) == (parity == "even"))


def facts(rng: Random) -> Example:
    return rng.choice((_capital_fact, _capital_fact, _kind_fact, _order_fact, _parity_fact))(rng)


def sequence(rng: Random) -> Example:
    low = rng.randrange(0, 90)
    numbers = list(range(low, low + rng.randint(3, 18)))
    template = rng.choice(phrases.COUNT_UP + phrases.COUNT_DOWN)
    question = phrases.vary(rng, template).format(a=numbers[0], b=numbers[-1])
    if template in phrases.COUNT_DOWN:
        numbers.reverse()
    return Example("sequence", f"{numbers[0]} {numbers[-1]}", question, ", ".join(map(str, numbers)))


Record = dict[str, str | int]


def _record(rng: Random) -> tuple[str, Record]:
    """A sentence and the values that stand in it, by field name."""
    values: Record = {
        "name": any_name(rng),
        "age": rng.randrange(18, 90),
        "city": rng.choice(list(CAPITALS.values())),
        "job": rng.choice(JOBS),
        "customer": any_name(rng),
        "item": any_word(rng),
        "quantity": rng.randrange(2, 100),
        "price": rng.randrange(1, 400),
        "event": rng.choice(phrases.EVENTS),
        "day": rng.choice(WEEKDAYS),
        "time": f"{rng.randrange(7, 23)}:{rng.choice(('00', '15', '30', '45'))}",
        "place": rng.choice(list(CAPITALS.values())),
    }
    texts = rng.choice((phrases.PERSON_TEXTS, phrases.PERSON_TEXTS, phrases.ORDER_TEXTS, phrases.EVENT_TEXTS))
    template = rng.choice(texts)
    fields = [field for _, field, _, _ in Formatter().parse(template) if field]
    return template.format(**values), {field: values[field] for field in fields}


def field(rng: Random) -> Example:
    text, record = _record(rng)
    name = rng.choice(list(record))
    question = phrases.vary(rng, rng.choice(phrases.FIELD)).format(field=name, text=text)
    return Example("field", text, question, str(record[name]))


def json_object(rng: Random) -> Example:
    text, record = _record(rng)
    if rng.random() < 0.15:
        question = phrases.vary(rng, rng.choice(phrases.JSON_ALL)).format(text=text)
        return Example("json", text, question, json.dumps(record))
    names = rng.sample(list(record), rng.randint(1, len(record)))
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    question = phrases.vary(rng, rng.choice(phrases.JSON)).format(fields=listed, text=text)
    return Example("json", text, question, json.dumps({name: record[name] for name in names}))


def _hard_request(rng: Random) -> Example:
    topics = (*phrases.HARD_TOPICS, article(rng.choice(WORDS)))
    topic = rng.choice(topics) + rng.choice(phrases.HARD_TAILS).format(topic=rng.choice(topics))
    template = rng.choice(phrases.HARD_REQUESTS)
    question = phrases.vary(rng, template).format(topic=topic)
    return Example("talk", f"{template} {topic}", question, phrases.TOO_HARD)


def _hard_question(rng: Random) -> Example:
    a, b, c = (rng.randrange(2, 100) for _ in range(3))
    template, opener = rng.choice(phrases.HARD_QUESTIONS), rng.choice(phrases.TALK_OPENERS)
    question = phrases.vary(rng, template).format(a=a, b=b, c=c)
    return Example("talk", f"{opener}{template} {a}", opener + question, phrases.TOO_HARD)


def _too_large(rng: Random) -> Example:
    a, b = rng.randrange(100, rng.choice((300, 2000, 20_000))), rng.randrange(rng.choice((10, 100, 1000)))
    if rng.random() < 0.3:
        a, b = b, a
    template = rng.choice(phrases.ADD + phrases.SUBTRACT)
    return Example("talk", f"{a} {b}", phrases.vary(rng, template).format(a=a, b=b), phrases.TOO_LARGE)


def _nonsense(rng: Random) -> Example:
    text = " ".join(invent_word(rng) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.3:
        text = "".join(rng.choice("asdfghjklqwertyuiop") for _ in range(rng.randint(4, 12)))
    return Example("talk", text, text, phrases.NOT_UNDERSTOOD)


def talk(rng: Random) -> Example:
    if rng.random() < 0.4:
        return rng.choice((_hard_request, _hard_request, _hard_question, _too_large, _nonsense))(rng)
    answer = rng.choice(list(phrases.TALK))
    template, opener = rng.choice(phrases.TALK[answer]), rng.choice(phrases.TALK_OPENERS)
    return Example("talk", opener + template, opener + phrases.vary(rng, template), answer)


def memory(rng: Random) -> Example:
    """What the user said about himself: told now, told earlier (then `setup` holds it), or never told."""
    topic = rng.choice(list(phrases.MEMORY))
    tells, acknowledge, asks, remember = phrases.MEMORY[topic]
    cities = tuple(CAPITALS.values())
    value = any_name(rng) if topic == "name" else rng.choice(cities if topic == "city" else COLORS)
    tell, ask = rng.choice(tells), rng.choice(asks)
    told = phrases.vary(rng, tell).format(v=value)
    answered = acknowledge.format(v=value, V=value.capitalize())
    draw = rng.random()
    if draw < 0.25:
        return Example("memory", f"{tell} {value}", told, answered)
    if draw < 0.35:
        opener = rng.choice(phrases.TALK_OPENERS)
        return Example("memory", opener + ask, opener + phrases.vary(rng, ask), phrases.NOT_TOLD)
    key = f"{tell} {value} {ask}"
    return Example("memory", key, phrases.vary(rng, ask), remember.format(v=value), ((told, answered),))


Draw = Callable[[Random], Example]

# name -> (how to draw one, its share of the training conversations' turns)
TASKS: dict[str, tuple[Draw, float]] = {
    "add": (add, 1.5),
    "subtract": (subtract, 1.8),
    "backwards": (backwards, 2.5),
    "sort": (sort, 2.2),
    "count": (count, 2.0),
    "units": (units, 1.5),
    "capitals": (capitals, 0.9),
    "facts": (facts, 1.8),
    "sequence": (sequence, 0.6),
    "field": (field, 1.1),
    "json": (json_object, 1.3),
    "talk": (talk, 1.3),
    "memory": (memory, 0.9),
}
