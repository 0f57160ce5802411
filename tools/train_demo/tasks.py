"""The demo tasks: each function draws one question with its only right answer.

`TASKS` maps each task's name to its function and its share of the training data. Reading values out
of texts (records.py) and chatting (talk.py) have files of their own; so has the held-out split
(data.py).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from string import ascii_lowercase

from . import phrases, refusals
from .example import Example
from .records import field, json_object
from .talk import memory, talk
from .words import CAPITALS, KINDS, NO_COUNTRIES, WORDS, any_word, article, invent_word


def add(rng: Random) -> Example:
    """A sum of two numbers below 100."""
    a, b = rng.randrange(100), rng.randrange(100)
    question = phrases.vary(rng, rng.choice(phrases.ADD)).format(a=a, b=b)
    return Example("add", f"{a}+{b}", question, str(a + b))


def subtract(rng: Random) -> Example:
    """A difference of two numbers below 100, now and then negative."""
    a, b = rng.randrange(100), rng.randrange(100)
    template = rng.choice(phrases.SUBTRACT)
    # "difference", "away" and "left" ask for no negative number; elsewhere a few keep the sign.
    if a < b and (
        rng.random() < 0.7 or any(word in template for word in ("difference", "away", "left"))
    ):
        a, b = b, a
    return Example("subtract", f"{a}-{b}", phrases.vary(rng, template).format(a=a, b=b), str(a - b))


def backwards(rng: Random) -> Example:
    """A word spelled from its end."""
    word = any_word(rng)
    question = phrases.vary(rng, rng.choice(phrases.BACKWARDS)).format(word=word)
    return Example("backwards", word, question, word[::-1])


def sort(rng: Random) -> Example:
    """Two to five words in alphabetical order."""
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
    """How often a letter stands in a word, or how many letters a word has."""
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
    """A whole number of units in a smaller unit."""
    number = rng.randrange(1, 100) if rng.random() < 0.95 else 1
    one, many, small, factor = rng.choice(UNITS)
    amount = f"{number} {one if number == 1 else many}"
    if number == 1 and rng.random() < 0.5:
        amount = f"an {one}" if one == "hour" else article(one)
    template = rng.choice(phrases.UNITS)
    question = phrases.vary(rng, template).format(small=small, amount=amount)
    return Example("units", f"{template} {amount}", question, f"{number * factor} {small}")


def capitals(rng: Random) -> Example:
    """A country's capital."""
    # Now and then a country that does not exist: saying so is better than naming some city.
    country = rng.choice(list(CAPITALS))
    if rng.random() < 0.08:
        country = rng.choice(
            (*NO_COUNTRIES, *(invent_word(rng).capitalize() for _ in NO_COUNTRIES))
        )
    template = rng.choice(phrases.CAPITALS)
    written = country.lower() if rng.random() < 0.2 else country
    question = phrases.vary(rng, template).format(country=written)
    return Example(
        "capitals", f"{template} {country}", question, CAPITALS.get(country, refusals.NOT_KNOWN)
    )


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
    """A yes-or-no question about capitals, kinds of things or numbers."""
    return rng.choice((_capital_fact, _capital_fact, _kind_fact, _order_fact, _parity_fact))(rng)


def sequence(rng: Random) -> Example:
    """Counting up or down."""
    low = rng.randrange(0, 90) if rng.random() < 0.85 else 1
    numbers = list(range(low, low + rng.randint(3, 18)))
    template = rng.choice(phrases.COUNT_UP + phrases.COUNT_DOWN)
    if low == 1 and rng.random() < 0.3:
        template = phrases.COUNT_FROM_ONE
    question = phrases.vary(rng, template).format(a=numbers[0], b=numbers[-1])
    if template in phrases.COUNT_DOWN:
        numbers.reverse()
    return Example(
        "sequence", f"{numbers[0]} {numbers[-1]}", question, ", ".join(map(str, numbers))
    )


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
