"""The tasks that read values out of a short text: one field, or several as JSON."""

from __future__ import annotations

import json
from random import Random
from string import Formatter

from . import phrases
from .example import Example
from .words import CAPITALS, JOBS, WEEKDAYS, any_name, any_word

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
    texts = rng.choice(
        (phrases.PERSON_TEXTS, phrases.PERSON_TEXTS, phrases.ORDER_TEXTS, phrases.EVENT_TEXTS)
    )
    template = rng.choice(texts)
    fields = [field for _, field, _, _ in Formatter().parse(template) if field]
    return template.format(**values), {field: values[field] for field in fields}


def field(rng: Random) -> Example:
    """One value out of a short text."""
    text, record = _record(rng)
    name = rng.choice(list(record))
    question = phrases.vary(rng, rng.choice(phrases.FIELD)).format(field=name, text=text)
    return Example("field", text, question, str(record[name]))


def json_object(rng: Random) -> Example:
    """Some or all values of a short text as a JSON object."""
    text, record = _record(rng)
    if rng.random() < 0.15:
        question = phrases.vary(rng, rng.choice(phrases.JSON_ALL)).format(text=text)
        return Example("json", text, question, json.dumps(record))
    names = rng.sample(list(record), rng.randint(1, len(record)))
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    question = phrases.vary(rng, rng.choice(phrases.JSON)).format(fields=listed, text=text)
    return Example("json", text, question, json.dumps({name: record[name] for name in names}))
